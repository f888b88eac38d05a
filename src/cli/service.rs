//! What a service manager is told, and how lines for its journal look.
//!
//! Under systemd a mount stays in the foreground: the manager knows that it answers by a message to a socket
//! (`sd_notify(3)`, `Type=notify`), and what goes to standard error is the journal's, which has times of its own
//! and takes a line's priority from its first characters (`sd-daemon(3)`).

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Where the manager listens; absent if there is none that wants to know.
const SOCKET: &str = "NOTIFY_SOCKET";
/// The journal's socket, as `device:inode`; others may have taken its place at standard error.
const JOURNAL: &str = "JOURNAL_STREAM";

/// Says something to the manager that started this process, if one did; a line for each thing.
pub(crate) fn notify(lines: &[&str]) {
    let Some(place) = std::env::var_os(SOCKET) else { return };
    if let Err(error) = address(place.as_encoded_bytes()).and_then(|to| send(&to, lines)) {
        log::warn!("the service manager was not told: {SOCKET}={}: {error}", place.display());
    }
}

fn send(to: &SocketAddr, lines: &[&str]) -> io::Result<()> {
    let socket = UnixDatagram::unbound()?;
    // A manager that does not read must not keep the mount from serving.
    socket.set_nonblocking(true)?;
    socket.send_to_addr(lines.join("\n").as_bytes(), to)?;
    Ok(())
}

/// `/path`, or `@name` without a file.
fn address(place: &[u8]) -> io::Result<SocketAddr> {
    match place.split_first() {
        Some((b'@', name)) => SocketAddr::from_abstract_name(name),
        Some((b'/', _)) => SocketAddr::from_pathname(String::from_utf8_lossy(place).as_ref()),
        _ => Err(io::Error::other("neither a path nor @name")),
    }
}

/// Whether standard error is the journal.
pub(crate) fn is_journal() -> bool {
    let expected = std::env::var(JOURNAL).unwrap_or_default();
    !expected.is_empty() && identity().is_ok_and(|found| found == expected)
}

fn identity() -> io::Result<String> {
    let metadata = File::from(io::stderr().as_fd().try_clone_to_owned()?).metadata()?;
    Ok(format!("{}:{}", metadata.dev(), metadata.ino()))
}

/// The priority of a line, as syslog(3) numbers them.
pub(crate) fn priority(level: log::Level) -> u8 {
    match level {
        log::Level::Error => 3,
        log::Level::Warn => 4,
        log::Level::Info => 6,
        log::Level::Debug | log::Level::Trace => 7,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manager_hears_each_line_once() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("socket");
        let name = format!("kvfs-test-{}", std::process::id());
        let hidden = SocketAddr::from_abstract_name(&name).unwrap();
        let sockets = [
            (path.to_str().unwrap().to_owned(), UnixDatagram::bind(&path).unwrap()),
            (format!("@{name}"), UnixDatagram::bind_addr(&hidden).unwrap()),
        ];
        for (place, socket) in sockets {
            send(&address(place.as_bytes()).unwrap(), &["READY=1", "STATUS=ready"]).unwrap();
            let mut message = [0; 64];
            let length = socket.recv(&mut message).unwrap();
            assert_eq!(&message[..length], b"READY=1\nSTATUS=ready", "{place}");
        }
        for place in ["", "relative", "vsock:2:1"] {
            assert!(address(place.as_bytes()).is_err(), "{place:?}");
        }
    }
}
