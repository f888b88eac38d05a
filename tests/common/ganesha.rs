//! An NFS server in user space, on loopback: nfs-ganesha, as a package installed it or as
//! `mount-scripts/fetch-nfs.sh` unpacked it.

use std::fs::File;
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::str::FromStr;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::eventually;
use super::forks::spawn;

const SERVER: &str = "ganesha.nfsd";

/// What happens to a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// It answers nothing until it goes on.
    Stop,
    Continue,
    /// What it held is gone.
    Kill,
    /// A new one, in the place of the one that was killed.
    Start,
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Order, String> {
        let all = [Order::Stop, Order::Continue, Order::Kill, Order::Start];
        let found = all.into_iter().find(|order| format!("{order:?}") == text);
        found.ok_or_else(|| format!("no order: {text}"))
    }
}

/// A server that exports one directory as `/kv`; it ends when dropped.
#[derive(Debug)]
pub(crate) struct Ganesha {
    port: u16,
    process: Option<Child>,
    directory: tempfile::TempDir,
}

/// Where `mount-scripts/fetch-nfs.sh` puts what it fetches: `KVFS_TEST_NFS_TOOLS`.
pub(crate) fn tools() -> PathBuf {
    let named = std::env::var_os("KVFS_TEST_NFS_TOOLS").map(PathBuf::from);
    named.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("target/test-tools/nfs"))
}

/// The unpacked server, if there is one.
fn unpacked() -> Option<PathBuf> {
    let root = tools().join("root");
    root.join("usr/bin").join(SERVER).is_file().then_some(root)
}

/// Why there is no server.
pub(crate) fn missing() -> Option<String> {
    let missing = unpacked().map_or_else(|| super::require::missing_program(SERVER), |_| None);
    missing.map(|missing| format!("{missing}: mount-scripts/fetch-nfs.sh fetches it"))
}

impl Ganesha {
    /// Starts one and waits until it listens.
    pub(crate) fn new() -> Ganesha {
        let directory = super::mount::scratch_directory();
        for name in ["exported", "state"] {
            std::fs::create_dir(directory.path().join(name)).unwrap();
        }
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let configuration = directory.path().join("ganesha.conf");
        std::fs::write(configuration, configuration_text(directory.path(), port)).unwrap();
        let mut server = Ganesha { port, process: None, directory };
        server.obey(Order::Start);
        server
    }

    pub(crate) fn port(&self) -> u16 {
        self.port
    }

    pub(crate) fn obey(&mut self, order: Order) {
        match order {
            Order::Stop => self.signal(Signal::SIGSTOP),
            Order::Continue => self.signal(Signal::SIGCONT),
            Order::Kill => self.end(),
            Order::Start => self.start(),
        }
    }

    fn signal(&self, signal: Signal) {
        let pid = self.process.as_ref().expect("a server that runs").id();
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), signal).unwrap();
    }

    fn start(&mut self) {
        assert!(self.process.is_none(), "one runs already");
        let at = |name: &str| self.directory.path().join(name);
        let log = File::options().create(true).append(true).open(at("log")).unwrap();
        let mut command = match unpacked() {
            Some(root) => {
                let libraries =
                    [root.join("usr/lib/x86_64-linux-gnu"), root.join("usr/lib/ganesha")];
                let mut command = Command::new(root.join("usr/bin").join(SERVER));
                command.env("LD_LIBRARY_PATH", std::env::join_paths(libraries).unwrap());
                command
            }
            None => Command::new(SERVER),
        };
        command.arg("-F").arg("-f").arg(at("ganesha.conf")).arg("-p").arg(at("pid"));
        command.args(["-L", "/dev/stderr"]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(spawn(&mut command).unwrap());
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, self.port));
        eventually("the NFS server to listen", || {
            let ended = self.process.as_mut().unwrap().try_wait().unwrap();
            let log = || std::fs::read_to_string(self.directory.path().join("log")).unwrap();
            assert!(ended.is_none(), "the NFS server gave up:\n{}", log());
            TcpStream::connect(address).is_ok().then_some(())
        });
    }

    fn end(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

impl Drop for Ganesha {
    fn drop(&mut self) {
        self.end();
    }
}

/// An export of one directory, without locks, port mappers and names of users.
fn configuration_text(directory: &Path, port: u16) -> String {
    let modules = unpacked().map_or_else(String::new, |root| {
        let modules = root.join("usr/lib/x86_64-linux-gnu/ganesha");
        format!("Plugins_Dir = \"{}\";", modules.display())
    });
    let directory = directory.display();
    format!(
        "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Bind_addr = 127.0.0.1; \
         Enable_NLM = false; Enable_RQUOTA = false; {modules} }}\n\
         NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = \"{directory}/state\"; \
         Only_Numeric_Owners = true; UseGetpwnam = true; }}\n\
         EXPORT {{ Export_Id = 1; Path = \"{directory}/exported\"; Pseudo = \"/kv\"; \
         Access_Type = RW; Squash = No_Root_Squash; SecType = sys; FSAL {{ Name = VFS; }} }}\n",
    )
}
