//! A directory of this machine, seen through the kernel's NFS client.

use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::eventually;
use super::forks::output;
use super::ganesha::{Ganesha, Order};

/// A mount of what a server exports, and the server if it is ours; both end when dropped.
pub(crate) struct Nfs {
    mountpoint: PathBuf,
    server: Server,
    _directory: Option<tempfile::TempDir>,
}

enum Server {
    Here(Ganesha),
    /// Whoever is at the other end passes orders on.
    Elsewhere(BufReader<TcpStream>),
    /// Nobody here can stop it.
    Foreign,
}

/// Why no directory can be mounted through NFS.
pub(crate) fn missing() -> Option<String> {
    if let Some(named) = named() {
        return named.err();
    }
    if !nix::unistd::geteuid().is_root() {
        return Some("no NFS mount named by KVFS_TEST_NFS, and not root".to_owned());
    }
    // It may be a module.
    let _ = output(Command::new("sh").args(["-c", "modprobe nfsv4 2>/dev/null"]));
    let known = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !known.lines().any(|line| line.ends_with("\tnfs4")) {
        return Some("the kernel has no NFS client (nfs4 is not in /proc/filesystems)".to_owned());
    }
    super::ganesha::missing()
}

/// Why no server can be stopped under such a mount.
pub(crate) fn missing_server() -> Option<String> {
    let is_foreign = named().is_some() && control().is_none();
    let foreign = || "nobody passes orders to the server of KVFS_TEST_NFS".to_owned();
    missing().or_else(|| is_foreign.then(foreign))
}

/// A directory that is there: `KVFS_TEST_NFS`.
fn named() -> Option<Result<PathBuf, String>> {
    let directory = PathBuf::from(std::env::var_os("KVFS_TEST_NFS")?);
    let kind = match nix::sys::statfs::statfs(&directory) {
        Ok(found) => found.filesystem_type(),
        Err(error) => return Some(Err(format!("KVFS_TEST_NFS: {error}"))),
    };
    let is_nfs = kind == nix::sys::statfs::NFS_SUPER_MAGIC;
    let refused = || format!("KVFS_TEST_NFS: {} is not on NFS", directory.display());
    Some(if is_nfs { Ok(directory.clone()) } else { Err(refused()) })
}

/// Who takes orders for the server of the directory that is named, `HOST:PORT`.
fn control() -> Option<String> {
    std::env::var("KVFS_TEST_NFS_CONTROL").ok()
}

impl Nfs {
    /// The directory that is named, or one that is exported and mounted here.
    pub(crate) fn mount() -> Nfs {
        if let Some(named) = named() {
            let stream = control().map(|address| TcpStream::connect(address).unwrap());
            let elsewhere = |stream| Server::Elsewhere(BufReader::new(stream));
            let server = stream.map_or(Server::Foreign, elsewhere);
            return Nfs { mountpoint: named.unwrap(), server, _directory: None };
        }
        let directory = super::mount::scratch_directory();
        let mountpoint = directory.path().join("mnt");
        std::fs::create_dir(&mountpoint).unwrap();
        let server = Ganesha::new();
        let port = server.port();
        let options = format!("vers=4.1,addr=127.0.0.1,clientaddr=127.0.0.1,port={port}");
        eventually("the NFS server", || {
            let mut mount = Command::new("mount");
            mount.args(["-i", "-t", "nfs4", "-o", &options, "127.0.0.1:/kv"]).arg(&mountpoint);
            output(&mut mount).status.success().then_some(())
        });
        Nfs { mountpoint, server: Server::Here(server), _directory: Some(directory) }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.mountpoint
    }

    /// Returns when it is done.
    pub(crate) fn order(&mut self, order: Order) {
        match &mut self.server {
            Server::Here(server) => server.obey(order),
            Server::Elsewhere(stream) => {
                writeln!(stream.get_mut(), "{order:?}").unwrap();
                let mut answer = String::new();
                stream.read_line(&mut answer).unwrap();
                assert_eq!(answer.trim(), "done");
            }
            Server::Foreign => panic!("nobody passes orders to this server"),
        }
    }
}

impl Drop for Nfs {
    fn drop(&mut self) {
        if matches!(self.server, Server::Here(_)) {
            output(Command::new("umount").arg("-f").arg(&self.mountpoint));
            output(Command::new("umount").arg("-l").arg(&self.mountpoint));
        }
    }
}
