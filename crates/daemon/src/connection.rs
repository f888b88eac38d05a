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
use super::ring::{self, Rings, Slots};
use super::shared::Shared;
use kvfs_fs::Transport;
use kvfs_fs::takeover::Descriptors;

/// Why a mount that is kept has no rings: a daemon that dies takes some of the requests along that it has in them.
pub(super) const KEPT: &str = "a mount that is kept takes its requests from the device";

/// Requests that the kernel may have under way in the background (readahead, releases).
const BACKGROUND_MAX: u16 = 64;

/// Where requests come from.
pub(super) struct Source {
    pub(super) device: Arc<OwnedFd>,
    /// Whether they are taken.
    pub(super) gate: Arc<Gate>,
    /// The longest one.
    pub(super) request_bytes_max: u32,
    /// Slots of rings, if they come through those.
    pub(super) slots: Option<Arc<Slots>>,
}

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
        options: &MountOptions, shared: &Shared, operations: Operations, left: &Descriptors,
    ) -> Result<Connection, MountError> {
        let device = Arc::new(kvfs_os::inherited(left.device).map_err(MountError::Mount)?);
        shared.connect(&device);
        let rings = left.rings.as_ref().map(Rings::take_over).transpose();
        let rings = rings.map_err(MountError::Rings)?;
        shared.fs.set_transport(match &rings {
            Some(rings) => Transport::Rings(rings.len()),
            None => Transport::Device(left.no_rings.clone()),
        });
        let device = device_of(device, options, WRITE_BYTES_MAX.max(left.request_bytes_max));
        let operations = Arc::new(operations);
        Ok(Connection { session: None, device, operations, rings })
    }

    /// What another daemon can go on with.
    pub(super) fn source(&self) -> Source {
        let Device { descriptor, gate, request_bytes_max, .. } = &self.device;
        Source {
            device: Arc::clone(descriptor),
            gate: Arc::clone(gate),
            request_bytes_max: *request_bytes_max,
            slots: self.rings.as_ref().map(Rings::slots),
        }
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
            let Device { descriptor, gate, .. } = &self.device;
            let begun = rings.begin(descriptor, &self.operations, gate);
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
    if options.keeper.is_some() {
        return Err(KEPT.to_owned());
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
