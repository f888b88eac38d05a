//! The daemon of a mount is exchanged for another program, and clients do not notice.
//!
//! 1. The program is asked whether it can read what this one leaves, and would make this mount ([`candidate`]).
//! 2. Nothing more is taken from the kernel, and what was taken is answered ([`gate`](super::gate)). What comes meanwhile
//!    waits in the kernel, or in slots of rings that nobody looks into.
//! 3. What is to be durable is committed. What only memory has goes into a memory file.
//! 4. The program takes the process over by execve(2), with the descriptors of the device, of the store's lock, of that
//!    file, of the memory of rings and of the memory tier. The kernel keeps the mount and its backing files as long as the device is open.
//!
//! Whatever fails before the last call leaves this daemon as it was. What waits for long (a remote, a slow disk) is not cut
//! off: the gate opens again after [`PATIENCE`], and it is tried anew.

pub(crate) mod candidate;
mod ending;
mod left;
mod threads;

use std::ffi::CString;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crossbeam_channel::{Receiver, bounded};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::unistd::alarm;

use super::background;
use super::connection::Source;
use super::keeper::Kept;
use super::mount::{MountError, MountOptions};
use super::notify::Notifier;
use super::shared::Shared;
use candidate::Candidate;
pub use ending::Ending;
use kvfs_fs::takeover::{
    Descriptors, Handover, Launch, Live, LiveRings, Progress, Secret, Unable, hand_over, obstacle,
    prepare, slow_changes_down, time_sync, wishes,
};
use kvfs_fs::{FileSystem, Transport, record_uses};
use kvfs_storage::tier::ram::Frozen;
use kvfs_storage::tier::remote::seal::KeyRing;
pub(super) use left::Left;
use threads::wait_until_interruptible;

/// How long requests may wait for those that were taken before to be answered.
const PATIENCE: Duration = Duration::from_millis(250);
/// How long the store's disk may take for a sync.
const SYNC_MAX: Duration = Duration::from_millis(80);
/// Between two attempts.
const RETRY_INTERVAL: Duration = Duration::from_millis(300);
/// After this it is given up.
const ATTEMPTS_MAX: Duration = Duration::from_secs(30);

/// What only memory has: names and handles, and the slots of rings.
type InMemory<'a> = (&'a Live, Option<&'a LiveRings>);

struct Exchanger {
    shared: Arc<Shared>,
    source: Source,
    notifier: Notifier,
    launch: Arc<Launch>,
    ending: Arc<Ending>,
    /// Of a sealed remote.
    keys: Option<Arc<KeyRing>>,
    exchanges: u64,
    keeper: Option<Arc<Kept>>,
    /// What keeps this mount from ever being handed over.
    obstacle: Option<String>,
}

/// Starts what exchanges the daemon when it is asked to, after it has begun to serve (`begins` is closed) and until the mount
/// ends.
pub(super) fn start(
    options: &MountOptions, shared: &Arc<Shared>, (source, notifier): (Source, Notifier),
    keeper: Option<&Arc<Kept>>, exchanges: u64, (begins, stopped): (Receiver<()>, &Receiver<()>),
) -> Result<(), MountError> {
    let Some(launch) = options.launch.clone() else { return Ok(()) };
    let is_read_only = options.read_only.then(|| "it is mounted read-only".to_owned());
    let obstacle = obstacle(&shared.fs).or(is_read_only);
    let (wanted, requests) = bounded(1);
    shared.fs.upgrades.carry_out_through(wanted);
    let shared = Arc::clone(shared);
    let ending = Arc::clone(&options.ending);
    let keys = options.remote.as_ref().and_then(|remote| remote.keys.clone());
    let keeper = keeper.cloned();
    let thread =
        Exchanger { shared, source, notifier, launch, ending, keys, exchanges, keeper, obstacle };
    let stopped = stopped.clone();
    // It is not waited for: an unmount does not wait for a program that does not answer.
    background::start("kvfs-exchange", move || {
        // Threads that have not begun yet come to no rest. Nothing is sent: the other end is dropped.
        let _ = begins.recv();
        thread.serve(&requests, &stopped);
    })
    .map(drop)
}

impl Exchanger {
    fn serve(&self, requests: &Receiver<Option<PathBuf>>, stopped: &Receiver<()>) {
        loop {
            let program = crossbeam_channel::select! {
                recv(stopped) -> _ => return,
                recv(requests) -> program => match program {
                    Ok(program) => program,
                    Err(_) => return,
                },
            };
            let program = program.unwrap_or_else(|| self.launch.program.clone());
            let exchange = AssertUnwindSafe(|| self.exchange(program, stopped));
            let why = match catch_unwind(exchange) {
                Ok(Ok(never)) => match never {},
                Ok(Err(why)) => why,
                Err(_) => "a fault of kvfs, which its log tells of".to_owned(),
            };
            log::warn!("this daemon stays: {why}");
            self.shared.fs.upgrades.note(Progress::Refused(why));
        }
    }

    /// Comes back only to say why this daemon stays.
    fn exchange(
        &self, program: PathBuf, stopped: &Receiver<()>,
    ) -> Result<std::convert::Infallible, String> {
        if let Some(why) = &self.obstacle {
            return Err(format!("{why}; stop the programs that use it, unmount and mount anew"));
        }
        self.check_place()?;
        let launch = self.launch_of_now(&program)?;
        let asked = Handover { launch, exchanges: self.exchanges + 1, ..Handover::default() };
        let candidate = Candidate::check(program, &asked)?;
        let program = candidate.program.display();
        log::info!("{program} is to go on with this mount");
        // So that little is left to be written while requests wait.
        let _slowed_down = slow_changes_down(&self.shared.fs);
        record_uses(&self.shared.fs).map_err(|error| error.to_string())?;
        prepare(&self.shared.fs)?;
        let end = Instant::now() + ATTEMPTS_MAX;
        loop {
            let why = match self.attempt(&candidate) {
                Unable::AsItIs(why) => return Err(why),
                Unable::Yet(why) => why,
            };
            if Instant::now() >= end {
                let seconds = ATTEMPTS_MAX.as_secs();
                return Err(format!("after {seconds} seconds {why} still: try again later"));
            }
            if stopped.recv_timeout(RETRY_INTERVAL)
                != Err(crossbeam_channel::RecvTimeoutError::Timeout)
            {
                return Err("it is being unmounted".to_owned());
            }
        }
    }

    /// Refuses where another daemon would not find the store: this one needs no path to it any more.
    fn check_place(&self) -> Result<(), String> {
        let place = &self.launch.store;
        match self.shared.fs.store().is_at(place) {
            Ok(true) => Ok(()),
            Ok(false) => Err(format!("another store lies at {} by now", place.display())),
            Err(error) => Err(format!("the store is not at {} any more: {error}", place.display())),
        }
    }

    fn launch_of_now(&self, program: &Path) -> Result<Launch, String> {
        launch_of_now(&self.launch, &self.shared.fs, program)
    }

    fn attempt(&self, candidate: &Candidate) -> Unable {
        if let Err(unable) = self.time_disk() {
            return unable;
        }
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let refusal = || self.source.slots.as_ref().and_then(|slots| slots.take_refusal());
        refusal();
        let Some(_shut) = self.source.gate.shut(PATIENCE) else {
            return Unable::Yet(match refusal() {
                Some(error) => format!("the kernel does not empty its rings ({error})"),
                None => "requests are in hand".to_owned(),
            });
        };
        if let Err(why) = prepare(&self.shared.fs).and_then(|()| self.check_place()) {
            return Unable::AsItIs(why);
        }
        match wait_until_interruptible(PATIENCE) {
            Ok(true) => {}
            Ok(false) => {
                return Unable::Yet("a thread waits for a disk or a server".to_owned());
            }
            Err(error) => return Unable::AsItIs(format!("/proc: {error}")),
        }
        let rings = match self.source.slots.as_ref().map(|slots| slots.live()).transpose() {
            Ok(rings) => rings,
            Err(why) => return Unable::AsItIs(why),
        };
        // Nothing is told to the kernel and no backing file is closed until the other program does so.
        let _silent = self.notifier.hold();
        let rings = rings.as_ref().map(|(rings, _stays_open)| rings);
        let go = |live: &Live| self.go(candidate, (live, rings), since);
        match hand_over(&self.shared.fs, go) {
            Err(unable) => unable,
            Ok(why) => Unable::AsItIs(why),
        }
    }

    /// Commits, and refuses where the disk is too slow for what it is asked while requests wait: a commit of what changes
    /// until then, and some ten syncs of both daemons.
    fn time_disk(&self) -> Result<(), Unable> {
        let begin = Instant::now();
        prepare(&self.shared.fs).map_err(Unable::AsItIs)?;
        let commit = begin.elapsed();
        let sync = time_sync(&self.shared.fs);
        let sync = sync.map_err(|error| Unable::AsItIs(format!("the store: {error}")))?;
        if commit > PATIENCE {
            return Err(Unable::Yet(format!("a commit takes {commit:.0?}")));
        }
        if sync > SYNC_MAX {
            return Err(Unable::Yet(format!("a sync of the store's disk takes {sync:.0?}")));
        }
        Ok(())
    }

    /// Gives the process to the program. Comes back only to say why not.
    fn go(&self, candidate: &Candidate, left: InMemory<'_>, since: Duration) -> String {
        match self.try_to_go(candidate, left, since) {
            Ok(never) => match never {},
            Err(error) => format!("{}: {error}", candidate.program.display()),
        }
    }

    fn try_to_go(
        &self, candidate: &Candidate, (live, rings): InMemory<'_>, since: Duration,
    ) -> std::io::Result<std::convert::Infallible> {
        let device = kvfs_os::to_be_inherited(&self.source.device)?;
        let lock = kvfs_os::to_be_inherited(self.shared.fs.store().lock_descriptor())?;
        let keeper = self.keeper.as_ref().map(|keeper| keeper.to_be_inherited()).transpose()?;
        let descriptors = Descriptors {
            device: device.as_raw_fd(),
            lock: lock.as_raw_fd(),
            request_bytes_max: self.source.request_bytes_max,
            rings: rings.cloned(),
            no_rings: match kvfs_fs::transport(&self.shared.fs) {
                Some(Transport::Device(why)) => why.clone(),
                Some(Transport::Rings(_)) | None => String::new(),
            },
            keeper: keeper.as_ref().map(AsRawFd::as_raw_fd),
        };
        let launch = self.launch_of_now(&candidate.program).map_err(std::io::Error::other)?;
        // In the order in which whoever evicts a copy takes them: of the file system, of the memory tier, of backing files.
        let ram = self.shared.fs.store().ram.as_ref().map(|ram| ram.freeze()).transpose()?;
        let backings = self.shared.backings.freeze();
        let left = Handover {
            launch,
            descriptors: Some(descriptors),
            live: None,
            backings: backings.live(),
            wishes: wishes(&self.shared.fs),
            ram: None,
            keys: self.keys.as_ref().map(|keys| Secret(keys.reveal())),
            exchanges: self.exchanges + 1,
            since: u64::try_from(since.as_nanos()).unwrap_or(u64::MAX),
            death: None,
        };
        let mut memory = File::from(memfd_create(c"kvfs-live", MFdFlags::MFD_CLOEXEC)?);
        memory.write_all(&left.to_bytes_with(live, ram.as_ref().map(Frozen::live)))?;
        log::info!("{} goes on with this mount", candidate.program.display());
        let is_ending = self.ending.hold();
        if *is_ending {
            return Err(std::io::Error::other("the mount was asked to end"));
        }
        // It has keys: no program that is started meanwhile has it.
        let memory = kvfs_os::to_be_inherited(&memory)?;
        let number = CString::new(memory.as_raw_fd().to_string())?;
        Err(candidate.run(&number))
    }
}

/// How the mount would be made now.
pub(super) fn launch_of_now(
    launch: &Launch, fs: &FileSystem, program: &Path,
) -> Result<Launch, String> {
    Ok(Launch {
        program: program.to_owned(),
        settings: kvfs_fs::settings_changed(fs),
        configuration: kvfs_fs::configuration(fs),
        capabilities: kvfs_os::own_capabilities().map_err(|error| error.to_string())?,
        ..launch.clone()
    })
}

/// The mount is served: the program that left it need not be feared for any more.
pub(super) fn note_served() {
    alarm::cancel();
}

/// Waits for a process, and ends it when it takes too long; whether it ended well.
fn wait(child: &mut std::process::Child, patience: Duration) -> std::io::Result<bool> {
    let end = Instant::now() + patience;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status.success());
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Err(std::io::ErrorKind::TimedOut.into());
        }
        thread::sleep(Duration::from_millis(2));
    }
}
