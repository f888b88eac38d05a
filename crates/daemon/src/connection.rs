//! The connection to the kernel: the mount itself, and the way of its requests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use fuser::{
    Config, Filesystem, InitFlags, KernelConfig, MountOption, Request, Session, SessionACL,
};

use super::device::{self, Device, WRITE_BYTES_MAX};
use super::dispatch::Operations;
use super::gate::Gate;
use super::mount::{MountError, MountOptions};
use super::notify::Notifier;
use super::ring::{self, Rings};
use super::shared::Shared;
use kvfs_fs::Transport;
use kvfs_fs::takeover::Descriptors;

/// Requests that the kernel may have under way in the background (readahead, releases).
const BACKGROUND_MAX: u16 = 64;

/// A mount that does not answer yet.
pub(super) struct Connection {
    /// Unmounts if it is dropped; none of a mount that another daemon has made.
    session: Option<Session<Handshake>>,
    device: Device,
    operations: Arc<Operations>,
    /// Rings, if the kernel waits for them.
    rings: Option<Rings>,
}

impl Connection {
    /// Mounts, and settles with the kernel how requests come.
    pub(super) fn open(
        options: &MountOptions, shared: &Shared, operations: Operations,
    ) -> Result<Connection, MountError> {
        let rings = prepare_rings(options);
        let agreed = Arc::new(AtomicBool::new(false));
        let handshake = Handshake {
            stack_depth: shared.fs.store().disk.stack_depth().map_err(MountError::Mount)? + 1,
            wants_rings: rings.is_ok(),
            agreed: Arc::clone(&agreed),
        };
        let session = Session::new(handshake, &options.mountpoint, &session_config(options))
            .map_err(MountError::Mount)?;
        let device = session.as_fd().try_clone_to_owned().map_err(MountError::Mount)?;
        let device = Arc::new(device);
        shared.connect(&device);
        let rings = match rings {
            Ok(rings) if agreed.load(Ordering::Relaxed) => {
                shared.fs.set_transport(Transport::Rings(rings.len()));
                Some(rings)
            }
            refused => {
                let reason = refused.err().unwrap_or_else(|| "the kernel has no rings".to_owned());
                shared.fs.set_transport(Transport::Device(reason));
                None
            }
        };
        let device = device_of(device, options, WRITE_BYTES_MAX);
        let operations = Arc::new(operations);
        Ok(Connection { session: Some(session), device, operations, rings })
    }

    /// Goes on with the connection of a daemon that has left it.
    pub(super) fn take_over(
        options: &MountOptions, shared: &Shared, operations: Operations, left: Descriptors,
    ) -> Result<Connection, MountError> {
        let device = Arc::new(kvfs_os::inherited(left.device).map_err(MountError::Mount)?);
        shared.connect(&device);
        shared.fs.set_transport(Transport::Device("turned off by option".to_owned()));
        let device = device_of(device, options, WRITE_BYTES_MAX.max(left.request_bytes_max));
        let operations = Arc::new(operations);
        Ok(Connection { session: None, device, operations, rings: None })
    }

    /// The descriptor, whether requests are read from it, and whether they come from nowhere else.
    pub(super) fn exchangeable(&self) -> (Arc<OwnedFd>, Arc<Gate>, u32, bool) {
        let Device { descriptor, gate, request_bytes_max, .. } = &self.device;
        let (descriptor, gate) = (Arc::clone(descriptor), Arc::clone(gate));
        (descriptor, gate, *request_bytes_max, self.rings.is_none())
    }

    /// Tells the kernel what to forget.
    pub(super) fn notifier(&self) -> Notifier {
        Notifier::new(Arc::clone(&self.device.descriptor))
    }

    /// Answers requests from now on. The threads end with the mount.
    pub(super) fn begin(self) -> Result<Vec<JoinHandle<()>>, MountError> {
        let running = self.rings.as_ref().map(Rings::running);
        let operations = Arc::clone(&self.operations);
        let mut threads = device::serve(&self.device, operations, running)?;
        if let Some(rings) = self.rings {
            let begun = rings.begin(&self.device.descriptor, &self.operations);
            threads.extend(begun.map_err(MountError::Rings)?);
        }
        // It would unmount the mountpoint once more, and hit whoever mounts there next.
        std::mem::forget(self.session);
        Ok(threads)
    }
}

fn device_of(descriptor: Arc<OwnedFd>, options: &MountOptions, request_bytes_max: u32) -> Device {
    let threads = options.threads.max(1);
    Device { descriptor, gate: Arc::default(), request_bytes_max, threads }
}

/// What is settled with the kernel before the first request.
struct Handshake {
    /// Of filesystems below the mount.
    stack_depth: u32,
    wants_rings: bool,
    /// Whether the kernel will wait for rings.
    agreed: Arc<AtomicBool>,
}

impl Filesystem for Handshake {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        let wanted = InitFlags::FUSE_PASSTHROUGH
            | InitFlags::FUSE_PARALLEL_DIROPS
            | InitFlags::FUSE_ATOMIC_O_TRUNC
            | InitFlags::FUSE_DO_READDIRPLUS
            | InitFlags::FUSE_AUTO_INVAL_DATA
            | InitFlags::FUSE_CACHE_SYMLINKS
            | InitFlags::FUSE_DIRECT_IO_ALLOW_MMAP
            | InitFlags::FUSE_NO_OPENDIR_SUPPORT
            | InitFlags::FUSE_ASYNC_DIO;
        let offered = config.capabilities();
        // What the kernel does not offer only costs speed.
        let _ = config.add_capabilities(wanted & offered);
        let rings = InitFlags::FUSE_OVER_IO_URING;
        if self.wants_rings && offered.contains(rings) {
            self.agreed.store(config.add_capabilities(rings).is_ok(), Ordering::Relaxed);
        }
        let _ = config.set_max_stack_depth(self.stack_depth);
        let _ = config.set_max_write(WRITE_BYTES_MAX);
        let _ = config.set_max_background(BACKGROUND_MAX);
        Ok(())
    }
}

/// Rings, or why there are none.
fn prepare_rings(options: &MountOptions) -> Result<Rings, String> {
    if !options.io_uring {
        return Err("turned off by option".to_owned());
    }
    let rings = Rings::prepare().map_err(|error| format!("no ring could be made: {error}"))?;
    ring::enable()?;
    Ok(rings)
}

fn session_config(options: &MountOptions) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(options.store.display().to_string()),
        // fuser drops its own Subtype option when it mounts without fusermount3.
        MountOption::CUSTOM("subtype=kvfs".to_owned()),
        MountOption::DefaultPermissions,
        MountOption::NoDev,
        MountOption::NoSuid,
    ];
    // Not RO where changes are refused: the kernel would refuse to have a question written to
    // `prefixes/match` as well.
    for option in &options.kernel_options {
        config.mount_options.push(match option.as_str() {
            "noexec" => MountOption::NoExec,
            "noatime" => MountOption::NoAtime,
            other => MountOption::CUSTOM(other.to_owned()),
        });
    }
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config
}
