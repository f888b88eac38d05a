//! Where metrics are served: the address, and the socket that listens there.
//!
//! It is bound before the store is opened, so that an address that is taken is one line of `kvfs mount` and
//! nothing was begun; what it answers comes from [`super::metrics_endpoint`] once the mount serves.

use std::ffi::OsStr;
use std::fmt::{self, Display};
use std::fs::{self, File};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::io::{self, ErrorKind};
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, RenameFlags, renameat2};
use nix::sys::stat::{Mode, fchmod};
use nix::unistd::{UnlinkatFlags, linkat, unlinkat};
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

/// A socket gets its name when it listens, and in one step only if the name is free. There is no lock, which another
/// user could hold for ever in a directory for all, and names on the way there cannot be guessed by one.
fn bind_file(path: &Path) -> io::Result<Listener> {
    // Whoever connects names all of it.
    SockAddr::unix(path)?;
    let name = path.file_name().unwrap_or_default();
    let parent = path.parent().unwrap_or(Path::new("/"));
    let place = Place { directory: open_path(parent, libc::O_DIRECTORY)?, name };
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // The file gets the mode of the socket, so there is no moment in which others may connect.
    fchmod(&socket, Mode::S_IRUSR | Mode::S_IWUSR)?;
    let temporary = unguessable();
    socket.bind(&SockAddr::unix(place.at(&temporary))?)?;
    let temporary_path = parent.join(&temporary);
    let mut file = SocketFile { identity: identity(&temporary_path)?, path: temporary_path };
    socket.listen(BACKLOG)?;
    socket.set_nonblocking(true)?;
    match place.rename(&temporary, name) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => {
            place.remove_dead()?;
            place.rename(&temporary, name).map_err(|error| match error.kind() {
                ErrorKind::AlreadyExists => ErrorKind::AddrInUse.into(),
                _ => error,
            })?;
        }
        outcome => outcome?,
    }
    path.clone_into(&mut file.path);
    Ok(Listener::Unix(socket.into(), file))
}

/// Where a socket gets its name.
struct Place<'a> {
    directory: File,
    name: &'a OsStr,
}

impl Place<'_> {
    /// A name there, as short as addresses of sockets must be.
    fn at(&self, name: impl AsRef<Path>) -> PathBuf {
        by_descriptor(&self.directory).join(name)
    }

    /// Renames there, onto nothing.
    fn rename(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) -> io::Result<()> {
        let (directory, from, to) = (&self.directory, from.as_ref(), to.as_ref());
        match renameat2(directory, from, directory, to, RenameFlags::RENAME_NOREPLACE) {
            // As file systems answer that have no such renames.
            Err(Errno::EINVAL) => {
                linkat(directory, from, directory, to, AtFlags::empty())?;
                Ok(unlinkat(directory, from, UnlinkatFlags::NoRemoveDir)?)
            }
            outcome => Ok(outcome?),
        }
    }

    /// Removes the socket that a daemon left which was killed: one where nobody listens.
    fn remove_dead(&self) -> io::Result<()> {
        // While it is held, no other file gets its inode number.
        let held = match open_path(&self.at(self.name), libc::O_NOFOLLOW) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            outcome => outcome?,
        };
        let metadata = held.metadata()?;
        if !metadata.file_type().is_socket() {
            let line = "the file is there and is no socket; choose another path";
            return Err(io::Error::other(line));
        }
        if listens(&held)? {
            return Err(ErrorKind::AddrInUse.into());
        }
        let aside = unguessable();
        match self.rename(self.name, &aside) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            outcome => outcome?,
        }
        let found = identity(&self.at(&aside))?;
        if found == (metadata.dev(), metadata.ino()) {
            return fs::remove_file(self.at(&aside));
        }
        // Another mount was faster, and gets its name back. Only a third one that comes in this very moment
        // could have it by now.
        if self.rename(&aside, self.name).is_err() {
            let _ = fs::remove_file(self.at(&aside));
        }
        Err(ErrorKind::AddrInUse.into())
    }
}

/// Opens nothing but the place: a FIFO or device is not waited for.
fn open_path(path: &Path, flags: i32) -> io::Result<File> {
    File::options().read(true).custom_flags(libc::O_PATH | flags).open(path)
}

fn by_descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// Whether somebody listens at a socket.
fn listens(held: &File) -> io::Result<bool> {
    let asking = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    // Somebody who does not take connections listens all the same.
    asking.set_nonblocking(true)?;
    match asking.connect(&SockAddr::unix(by_descriptor(held))?) {
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => Ok(false),
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error),
        _ => Ok(true),
    }
}

/// A name that nobody can have taken to be in the way.
fn unguessable() -> String {
    format!(".kvfs-{:016x}", RandomState::new().build_hasher().finish())
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

    #[test]
    fn nobody_else_keeps_a_socket_from_its_directory() {
        let directory = tempfile::tempdir().unwrap();
        let others = File::open(directory.path()).unwrap();
        others.lock().unwrap();
        let listener = Listener::bind(&MetricsAddress::Unix(directory.path().join("socket")));
        assert_eq!(names(directory.path()), ["socket"], "{listener:?}");
        drop(listener);
        assert!(names(directory.path()).is_empty());
    }

    #[test]
    fn a_fifo_above_is_an_error_and_not_waited_for() {
        let directory = tempfile::tempdir().unwrap();
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
        let (sender, answers) = std::sync::mpsc::channel();
        let address = MetricsAddress::Unix(fifo.join("socket"));
        let bind = move || sender.send(Listener::bind(&address).map(drop));
        std::thread::Builder::new().spawn(bind).unwrap();
        let answer = answers.recv_timeout(std::time::Duration::from_secs(10)).unwrap();
        let line = answer.unwrap_err().to_string();
        assert!(line.contains("Not a directory"), "{line}");
    }

    #[test]
    fn of_many_that_find_a_dead_socket_one_gets_its_name() {
        const TRIES: usize = 50;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        for _ in 0..TRIES {
            drop(UnixListener::bind(&path).unwrap());
            let bind = || Listener::bind(&MetricsAddress::Unix(path.clone()));
            let bound: Vec<_> = std::thread::scope(|scope| {
                let threads = [(); 2].map(|()| scope.spawn(bind));
                threads.into_iter().map(|thread| thread.join().unwrap()).collect()
            });
            assert_eq!(bound.iter().filter(|bound| bound.is_ok()).count(), 1, "{bound:?}");
            assert!(std::os::unix::net::UnixStream::connect(&path).is_ok());
            assert_eq!(names(directory.path()), ["socket"]);
        }
    }

    fn names(directory: &Path) -> Vec<String> {
        let names = fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().file_name());
        names.map(|name| name.into_string().unwrap()).collect()
    }
}
