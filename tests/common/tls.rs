//! TLS on loopback in front of a server that has none.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::PrivateKeyDer;

/// Ends with the value.
pub(crate) struct TlsServer {
    _runtime: Runtime,
    directory: tempfile::TempDir,
    port: u16,
}

impl TlsServer {
    /// Passes on to this address what arrives at [`Self::url`].
    pub(crate) fn start(behind: SocketAddr) -> TlsServer {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("certificate.pem"), made.cert.pem()).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).unwrap();
        let port = listener.local_addr().unwrap().port();
        runtime.spawn(pass_on(listener, TlsAcceptor::from(Arc::new(config)), behind));
        TlsServer { _runtime: runtime, directory, port }
    }

    pub(crate) fn url(&self) -> String {
        format!("https://localhost:{}", self.port)
    }

    /// Of whom a client must know to trust the server.
    pub(crate) fn certificate(&self) -> PathBuf {
        self.directory.path().join("certificate.pem")
    }
}

async fn pass_on(listener: TcpListener, acceptor: TlsAcceptor, behind: SocketAddr) {
    while let Ok((client, _)) = listener.accept().await {
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            // Who does not like the certificate hangs up.
            let Ok(mut client) = acceptor.accept(client).await else { return };
            let Ok(mut server) = TcpStream::connect(behind).await else { return };
            let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
        });
    }
}
