//! The connection to the kernel: the mount itself, and the way of its requests.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use fuser::{Config, MountOption, Notifier, Session, SessionACL};

use super::device::Callbacks;
use super::dispatch::Operations;
use super::mount::{MountError, MountOptions};
use super::ring::{self, Rings};
use super::shared::Shared;
use kvfs_fs::Transport;

/// A mount that does not answer yet.
pub(super) struct Connection {
    session: Session<Callbacks>,
    device: Arc<OwnedFd>,
    /// Rings that the kernel waits for, and what they serve.
    rings: Option<(Rings, Arc<Operations>)>,
}

impl Connection {
    /// Mounts, and settles with the kernel how requests come.
    pub(super) fn open(
        options: &MountOptions, shared: &Shared, operations: Operations,
    ) -> Result<Connection, MountError> {
        let operations = Arc::new(operations);
        let rings = prepare_rings(options);
        let agreed = Arc::new(AtomicBool::new(false));
        let running = rings.as_ref().ok().map(Rings::running);
        let callbacks = Callbacks::new(Arc::clone(&operations), running, Arc::clone(&agreed));
        let session = Session::new(callbacks, &options.mountpoint, &session_config(options))
            .map_err(MountError::Mount)?;
        let device = session.as_fd().try_clone_to_owned().map_err(MountError::Mount)?;
        let device = Arc::new(device);
        shared.connect(&device, session.notifier());
        let rings = match rings {
            Ok(rings) if agreed.load(Ordering::Relaxed) => {
                shared.fs.set_transport(Transport::Rings(rings.len()));
                Some((rings, operations))
            }
            refused => {
                let reason = refused.err().unwrap_or_else(|| "the kernel has no rings".to_owned());
                shared.fs.set_transport(Transport::Device(reason));
                None
            }
        };
        Ok(Connection { session, device, rings })
    }

    /// Tells the kernel what to forget.
    pub(super) fn notifier(&self) -> Notifier {
        self.session.notifier()
    }

    pub(super) fn device(&self) -> Arc<OwnedFd> {
        Arc::clone(&self.device)
    }

    /// Answers requests from now on. Returns the threads of rings; they end with the mount.
    pub(super) fn begin(self) -> Result<Vec<JoinHandle<()>>, MountError> {
        let session = self.session.spawn().map_err(MountError::Thread)?;
        let rings = self.rings.map(|(rings, operations)| rings.begin(&self.device, &operations));
        let threads = rings.transpose().map_err(MountError::Rings)?;
        // fuser would unmount the mountpoint once more, and hit whoever mounts there next.
        std::mem::forget(session);
        Ok(threads.unwrap_or_default())
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
    config.n_threads = Some(options.threads.max(1));
    config.clone_fd = true;
    config
}
