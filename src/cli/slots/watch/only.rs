//! One watch for each server.
//!
//! An address in the abstract namespace of Unix sockets is held for as long as the process lives, leaves no file,
//! and is seen where the server's port is: in the same network namespace. The files that are exchanged with the server
//! are called after it as well, so that the next watch knows those that were left.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{SocketAddr as InternetAddress, ToSocketAddrs};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use reqwest::Url;

use crate::cli::output::Failure;

/// Digits of a hash in the name of a file.
const DIGITS: usize = 12;

/// Held as long as this is.
#[derive(Debug)]
pub(super) struct Only {
    _held: UnixListener,
    file_prefix: String,
}

impl Only {
    /// Fails if somebody watches the server already.
    pub(super) fn claim(server: &str) -> Result<Self, Failure> {
        let address = address(server)?;
        let explain = |error: std::io::Error| Failure::Failed(format!("{server}: {error}"));
        let name = format!("kvfs-slots-watch/{address}");
        let name = SocketAddr::from_abstract_name(name).map_err(explain)?;
        let held = UnixListener::bind_addr(&name).map_err(|error| match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                Failure::Failed(format!("{server} is watched by another kvfs slots watch already"))
            }
            _ => explain(error),
        })?;
        // Servers of several machines or containers may share a directory, each at its own port 8080.
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let network = std::fs::read_link("/proc/self/ns/net").unwrap_or_default();
        let place = format!("{}/{}/{address}", host.trim(), network.display());
        let hash = blake3::hash(place.as_bytes()).to_hex();
        Ok(Self { _held: held, file_prefix: format!("kvfs-watch-{}-", &hash[..DIGITS]) })
    }

    /// How the names of files begin that watches of this server exchange with it.
    pub(super) fn file_prefix(&self) -> String {
        self.file_prefix.clone()
    }

    /// A name that no other process has.
    pub(super) fn file_name(&self) -> String {
        let random = RandomState::new().build_hasher().finish();
        format!("{}{random:016x}.bin", self.file_prefix)
    }
}

/// Where a server listens, whatever its host is called; as it was given where nobody knows that host now.
fn address(server: &str) -> Result<String, Failure> {
    let wrong = |why: String| Failure::Usage(format!("--server {server}: {why}"));
    let url = Url::parse(server).map_err(|error| wrong(error.to_string()))?;
    let (Some(host), Some(port)) = (url.host_str(), url.port_or_known_default()) else {
        return Err(wrong("name a host, as http://127.0.0.1:8080".to_owned()));
    };
    let name = host.trim_start_matches('[').trim_end_matches(']');
    let found = (name, port).to_socket_addrs().ok().and_then(|mut found| {
        let first = found.next()?;
        Some(found.fold(first, InternetAddress::min))
    });
    Ok(found.map_or_else(|| format!("{host}:{port}"), |found| found.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_has_one_address() {
        fn check(server: &str, expected: &str) {
            assert_eq!(address(server).unwrap(), expected, "{server}");
        }
        check("http://127.0.0.1:8080/", "127.0.0.1:8080");
        check("http://127.0.0.1:8080", "127.0.0.1:8080");
        check("http://127.0.0.1", "127.0.0.1:80");
        check("http://[::1]:8080", "[::1]:8080");
        for server in ["127.0.0.1:8080", "", "unix:/run/llama", "http://"] {
            assert!(matches!(address(server), Err(Failure::Usage(_))), "{server}");
        }
    }

    #[test]
    fn a_server_is_watched_once() {
        let server = "http://127.0.0.1:9";
        let first = Only::claim(server).unwrap();
        let second = Only::claim("http://127.0.0.1:9/").unwrap_err();
        assert!(second.line().contains("watched by another"), "{second:?}");
        assert_ne!(first.file_name(), first.file_name());
        let prefix = first.file_prefix();
        drop(first);
        let again = Only::claim(server).unwrap();
        assert!(again.file_name().starts_with(&prefix));
        assert!(Only::claim("http://127.0.0.1:10").is_ok());
    }
}
