//! The daemon's half: it says with what another one would go on.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};

use super::{ARM, END, Place, READY};
use crate::connection::KEPT;
use kvfs_fs::takeover::{Death, Descriptors, Handover};
use kvfs_os::SharedWords;

/// How long the keeper may take to let go of the mount: it does nothing else meanwhile.
const PATIENCE_MS: u16 = 2000;

/// The connection to the keeper.
#[derive(Debug)]
pub struct Kept {
    connection: OwnedFd,
    /// The keeper knows how to go on.
    is_armed: AtomicBool,
}

/// What outlives this daemon.
#[derive(Debug)]
pub(crate) struct Outlives {
    pub(crate) device: Arc<OwnedFd>,
    pub(crate) lock: OwnedFd,
    pub(crate) request_bytes_max: u32,
    pub(crate) touched: Arc<SharedWords>,
    pub(crate) backings: Arc<SharedWords>,
}

impl Kept {
    /// With the keeper at the other end.
    pub fn new(connection: OwnedFd) -> Kept {
        Kept { connection, is_armed: AtomicBool::new(false) }
    }

    /// The connection that the keeper has given to this program.
    ///
    /// # Errors
    /// It is not open.
    pub fn inherited(number: RawFd) -> io::Result<Kept> {
        kvfs_os::inherited(number).map(Kept::new)
    }

    /// The connection, for the program that takes this process over.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub(crate) fn to_be_inherited(&self) -> io::Result<OwnedFd> {
        kvfs_os::to_be_inherited(&self.connection)
    }

    /// Says with what another daemon goes on if this one dies. `left` is how the mount was made.
    pub(crate) fn arm(&self, outlives: &Outlives, deaths: u64, left: Handover) -> io::Result<()> {
        let death = Death {
            deaths: deaths + 1,
            touched: Place::Touched.number(),
            backings: Place::Backings.number(),
        };
        let descriptors = Descriptors {
            device: Place::Device.number(),
            lock: Place::Lock.number(),
            request_bytes_max: outlives.request_bytes_max,
            rings: None,
            no_rings: KEPT.to_owned(),
            keeper: Some(Place::CONNECTION),
        };
        let left = Handover { descriptors: Some(descriptors), death: Some(death), ..left };
        let mut told = File::from(memfd_create(c"kvfs-left", MFdFlags::MFD_CLOEXEC)?);
        told.write_all(&left.to_bytes())?;
        // What lies at its path may be another program by now.
        let program = File::open("/proc/self/exe")?;
        let all: [&dyn AsRawFd; Place::COUNT] = [
            &told,
            &program,
            &outlives.device,
            &outlives.lock,
            &outlives.touched.as_fd(),
            &outlives.backings.as_fd(),
        ];
        kvfs_os::send(&self.connection, ARM, &all)?;
        self.is_armed.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// The mount answers: the keeper may say so.
    pub(crate) fn ready(&self) {
        if let Err(error) = kvfs_os::send(&self.connection, READY, &[]) {
            log::error!(
                "the keeper of the mount is gone ({error}): the mount ends if its daemon dies"
            );
        }
    }

    /// Whether another daemon would go on now.
    ///
    /// # Errors
    /// Why not.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let mut end = [PollFd::new(self.connection.as_fd(), PollFlags::empty())];
        // It has closed its end otherwise.
        if !matches!(poll(&mut end, PollTimeout::ZERO), Ok(0)) {
            return Err("the keeper is gone");
        }
        let is_armed = self.is_armed.load(Ordering::Relaxed);
        is_armed.then_some(()).ok_or("the keeper was not told yet how to go on")
    }

    /// The mount has ended: waits until the keeper has let go of it.
    pub(crate) fn end(&self) {
        if kvfs_os::send(&self.connection, END, &[]).is_err() {
            // It is gone, and has nothing any more.
            return;
        }
        let mut answer = [PollFd::new(self.connection.as_fd(), PollFlags::POLLIN)];
        if !matches!(poll(&mut answer, PollTimeout::from(PATIENCE_MS)), Ok(1..)) {
            log::warn!(
                "the keeper of the mount does not answer: it may have the store for a while"
            );
        }
    }
}
