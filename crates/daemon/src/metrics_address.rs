//! Where metrics are served: the address, and the socket that listens there.
//!
//! It is bound before the store is opened, so that an address that is taken is one line of `kvfs mount` and
//! nothing was begun; what it answers comes from [`super::metrics_endpoint`] once the mount serves.

use std::fmt::{self, Display};
use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::sys::stat::{Mode, fchmod};
use socket2::{Domain, SockAddr, Socket, Type};

use super::mount::MountError;

/// Connections that wait to be taken; more are refused by the kernel, or wait there.
const BACKLOG: i32 = 64;

/// Where metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetricsAddress {
    /// `ADDRESS:PORT`; no names, which somebody else would resolve.
    Tcp(SocketAddr),
    /// `unix:PATH`, for the user of the daemon alone.
    Unix(PathBuf),
}

impl FromStr for MetricsAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<MetricsAddress, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = PathBuf::from(path);
            if path.is_absolute() && path.file_name().is_some() {
                return Ok(MetricsAddress::Unix(path));
            }
            return Err(format!("{text:?}: the path must be absolute and name a file"));
        }
        text.parse().map(MetricsAddress::Tcp).map_err(|_| {
            format!("{text:?} is no address: write 127.0.0.1:PORT, [::1]:PORT or unix:PATH")
        })
    }
}

impl Display for MetricsAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MetricsAddress::Tcp(address) => write!(formatter, "{address}"),
            MetricsAddress::Unix(path) => write!(formatter, "unix:{}", path.display()),
        }
    }
}

impl MetricsAddress {
    /// Whether only this machine reaches it.
    pub fn is_local(&self) -> bool {
        match self {
            MetricsAddress::Tcp(address) => address.ip().is_loopback(),
            MetricsAddress::Unix(_) => true,
        }
    }
}

/// A socket that listens, and does not block.
#[derive(Debug)]
pub(super) enum Listener {
    /// A port.
    Tcp(TcpListener),
    /// A file, which goes with it.
    Unix(UnixListener, SocketFile),
}

/// The file of a socket, removed at the end unless somebody has put another in its place.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    identity: (u64, u64),
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|metadata| (metadata.dev(), metadata.ino()))
}

impl Listener {
    /// Listens; the error is one line.
    pub(super) fn bind(address: &MetricsAddress) -> Result<Listener, MountError> {
        let bound = match address {
            MetricsAddress::Tcp(address) => bind_port(*address).map(Listener::Tcp),
            MetricsAddress::Unix(path) => bind_file(path),
        };
        let line = |error: io::Error| match error.kind() {
            ErrorKind::AddrInUse => format!(
                "metrics cannot be served at {address}: another program or mount listens there; \
                 choose another metrics_addr"
            ),
            _ => format!("metrics cannot be served at {address}: {error}"),
        };
        bound.map_err(|error| MountError::Metrics(line(error)))
    }

    /// What was bound: a port of 0 has become one that was free.
    pub(super) fn address(&self) -> io::Result<MetricsAddress> {
        match self {
            Listener::Tcp(listener) => listener.local_addr().map(MetricsAddress::Tcp),
            Listener::Unix(_, file) => Ok(MetricsAddress::Unix(file.path.clone())),
        }
    }
}

fn bind_port(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

fn bind_file(path: &Path) -> io::Result<Listener> {
    // Two mounts that find the same file of a dead one take turns, or the second would remove the first's.
    let directory = File::open(path.parent().unwrap_or(Path::new("/")))?;
    directory.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => {
            io::Error::other("its directory is locked by another program: try again")
        }
        TryLockError::Error(error) => error,
    })?;
    remove_dead(path)?;
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The file gets the mode of the socket, so there is no moment in which others may connect.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile { path: path.to_owned(), identity: identity(path)? };
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    Ok(Listener::Unix(socket.into(), file))
}

/// Removes the socket that a daemon left which was killed: one where nobody listens.
fn remove_dead(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
        Ok(metadata) if !metadata.file_type().is_socket() => {
            return Err(io::Error::other(
                "the file is there and is no socket; choose another path",
            ));
        }
        Ok(_) => {}
    }
    let asking = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Somebody who does not take connections listens all the same.
    asking.set_nonblocking(true)?;
    match asking.connect(&SockAddr::unix(path)?) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => fs::remove_file(path),
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Err(ErrorKind::AddrInUse.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses() {
        fn check(text: &str, expected: Option<bool>) {
            let parsed = text.parse::<MetricsAddress>();
            assert_eq!(parsed.as_ref().ok().map(MetricsAddress::is_local), expected, "{text}");
            if let Ok(address) = parsed {
                assert_eq!(address.to_string(), text);
            }
        }
        check("127.0.0.1:9400", Some(true));
        check("[::1]:0", Some(true));
        check("0.0.0.0:9400", Some(false));
        check("[::]:9400", Some(false));
        check("unix:/run/kvfs.sock", Some(true));
        check("unix:kvfs.sock", None);
        check("unix:/", None);
        check("unix:", None);
        check("localhost:9400", None);
        check("127.0.0.1", None);
        check("127.0.0.1:99999", None);
        check("", None);
    }

    #[test]
    fn only_a_dead_socket_is_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let address = MetricsAddress::Unix(path.clone());
        let listener = Listener::bind(&address).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        let line = Listener::bind(&address).unwrap_err().to_string();
        assert!(line.contains("another program or mount listens there"), "{line}");
        // Killed: the file stays and nobody listens.
        let Listener::Unix(socket, file) = listener else { panic!("{listener:?}") };
        std::mem::forget(file);
        drop(socket);
        let listener = Listener::bind(&address).unwrap();
        drop(listener);
        assert!(!path.exists(), "it goes with the mount");
        fs::write(&path, "precious").unwrap();
        let line = Listener::bind(&address).unwrap_err().to_string();
        assert!(line.contains("is no socket"), "{line}");
        assert_eq!(fs::read(&path).unwrap(), b"precious");
    }
}
