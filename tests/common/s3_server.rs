//! An S3 server on loopback, started and ended by the test.

use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::eventually;
use super::require::s3_server;

pub(crate) const KEY: &str = "test-key";
pub(crate) const SECRET: &str = "test-secret";
/// What is put there is read back after a minute, when nothing can delete it any more; only then do
/// names rely on it.
pub(crate) const SETTLED_WITHIN: Duration = Duration::from_secs(150);

/// The variables that lead to a server.
pub(crate) fn environment(address: SocketAddr, secret: &str) -> Vec<(String, String)> {
    let endpoint = format!("http://{address}");
    [
        ("AWS_ENDPOINT_URL", endpoint.as_str()),
        ("AWS_ALLOW_HTTP", "true"),
        ("AWS_REGION", "us-east-1"),
        ("AWS_ACCESS_KEY_ID", KEY),
        ("AWS_SECRET_ACCESS_KEY", secret),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

/// A running server with one bucket.
pub(crate) struct Server {
    process: Child,
    pub(crate) root: tempfile::TempDir,
    pub(crate) address: SocketAddr,
}

impl Server {
    pub(crate) fn start() -> Server {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        drop(listener);
        let process = Server::launch(&root, address);
        Server { process, root, address }
    }

    fn launch(root: &tempfile::TempDir, address: SocketAddr) -> Child {
        let port = address.port().to_string();
        let process = Command::new(s3_server().unwrap())
            .args(["--host", "127.0.0.1", "--port", &port])
            .args(["--access-key", KEY, "--secret-key", SECRET])
            .arg(root.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        eventually("the server listens", || TcpStream::connect(address).ok());
        process
    }

    pub(crate) fn stop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(crate) fn restart(&mut self) {
        self.process = Server::launch(&self.root, self.address);
    }

    pub(crate) fn environment(&self, secret: &str) -> Vec<(String, String)> {
        environment(self.address, secret)
    }

    pub(crate) fn files(&self) -> PathBuf {
        self.root.path().join("bucket/some/prefix")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
