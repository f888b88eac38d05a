//! A directory of this machine, seen through the kernel's NFS client.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::eventually;
use super::forks::{output, spawn};

/// A server in user space on loopback, and a mount of what it exports; both end when dropped.
pub(crate) struct Nfs {
    mountpoint: PathBuf,
    server: Option<Child>,
    _directory: Option<tempfile::TempDir>,
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
    super::require::missing_program(SERVER)
}

const SERVER: &str = "ganesha.nfsd";

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

impl Nfs {
    /// The directory that is named, or one that is exported and mounted here.
    pub(crate) fn mount() -> Nfs {
        if let Some(named) = named() {
            return Nfs { mountpoint: named.unwrap(), server: None, _directory: None };
        }
        let directory = super::mount::scratch_directory();
        let [exported, state, mountpoint] = ["exported", "state", "mnt"].map(|name| {
            let path = directory.path().join(name);
            std::fs::create_dir(&path).unwrap();
            path
        });
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let configuration = directory.path().join("ganesha.conf");
        std::fs::write(&configuration, configuration_text(&exported, &state, port)).unwrap();
        let log = File::create(directory.path().join("log")).unwrap();
        let mut server = Command::new(SERVER);
        server.arg("-F").arg("-f").arg(&configuration).arg("-p").arg(directory.path().join("pid"));
        server.args(["-L", "/dev/stderr"]).stderr(log).stdout(Stdio::null());
        let server = Some(spawn(&mut server).unwrap());
        let nfs = Nfs { mountpoint, server, _directory: Some(directory) };
        let options = format!("vers=4.1,addr=127.0.0.1,clientaddr=127.0.0.1,port={port}");
        eventually("the NFS server", || {
            let mut mount = Command::new("mount");
            mount.args(["-i", "-t", "nfs4", "-o", &options, "127.0.0.1:/kv"]).arg(&nfs.mountpoint);
            output(&mut mount).status.success().then_some(())
        });
        nfs
    }

    pub(crate) fn path(&self) -> &Path {
        &self.mountpoint
    }
}

/// An export of one directory, without locks and port mappers.
fn configuration_text(exported: &Path, state: &Path, port: u16) -> String {
    format!(
        "NFS_CORE_PARAM {{ Protocols = 4; NFS_Port = {port}; Bind_addr = 127.0.0.1; \
         Enable_NLM = false; Enable_RQUOTA = false; }}\n\
         NFSv4 {{ Graceless = true; RecoveryBackend = fs; RecoveryRoot = \"{}\"; }}\n\
         EXPORT {{ Export_Id = 1; Path = \"{}\"; Pseudo = \"/kv\"; Access_Type = RW; \
         Squash = No_Root_Squash; SecType = sys; FSAL {{ Name = VFS; }} }}\n",
        state.display(),
        exported.display(),
    )
}

impl Drop for Nfs {
    fn drop(&mut self) {
        if let Some(mut server) = self.server.take() {
            output(Command::new("umount").arg("-f").arg(&self.mountpoint));
            output(Command::new("umount").arg("-l").arg(&self.mountpoint));
            let _ = server.kill();
            let _ = server.wait();
        }
    }
}
