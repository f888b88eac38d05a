//! Requests that come through `/dev/fuse`.
//!
//! All threads read from one descriptor, of which there is no clone (`FUSE_DEV_IOC_CLONE`): what was read through
//! a clone ends with it. A request that comes while no other waits is served from where it was read; the others wait in
//! a [line]. Where the threads that serve them are held up, [others](understudies) do.

mod left;
mod line;
mod understudies;

use std::io::{self, IoSlice};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use memmap2::{MmapMut, MmapOptions};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use zerocopy::{FromBytes, IntoBytes};

use super::background::start;
use super::dispatch::Operations;
use super::gate::{Gate, InHand, Reader};
use super::held::take_held;
use super::mount::MountError;
use super::protocol::wire::{InHeader, OutHeader, opcode};
use super::protocol::{Request, Ticket, Way, answer, forget, take};
use super::ring::Running;
use super::turns::User;
use kvfs_storage::store::record::InodeId;
use line::{Line, Taken};
use understudies::Understudies;

/// Largest request without passthrough: beyond 1 MiB copying costs more than round trips.
pub(super) const WRITE_BYTES_MAX: u32 = 1 << 20;

/// What comes before the bytes of a write, and more: the kernel asks for room for it (`fuse_dev_do_read`).
const HEADER_BYTES_MAX: usize = 4096;

/// Name of the threads, before their number.
const NAME: &str = "kvfs-device";

/// When several waited, a thread looks for more behind each of the next so many requests, and later behind every so many
/// only: a look behind each takes a fifth of the time of writes of 4 KiB.
const LOOK_EVERY: u32 = 16;

/// Requests that wait at a time where several clients ask. One client has two: what it asks for, and a file that it closed.
const CROWD: usize = 3;

/// Threads beyond those that serve requests: so many may be held up besides before anybody waits behind one of them.
const UNDERSTUDIES: usize = 2;

/// What the threads share. When the last of them ends, the kernel has let the mount go: rings and whatever else
/// uses the operations end then.
struct Served {
    operations: Arc<Operations>,
    line: Line,
    understudies: Understudies,
    /// Rings, if there are any.
    _rings: Option<Running>,
}

/// The device, and how it is read.
pub(super) struct Device {
    pub(super) descriptor: Arc<OwnedFd>,
    pub(super) gate: Arc<Gate>,
    /// How long a request may be.
    pub(super) request_bytes_max: u32,
    pub(super) threads: usize,
}

/// Starts threads that serve requests until the mount ends.
pub(super) fn serve(
    from: &Device, operations: Arc<Operations>, rings: Option<Running>,
) -> Result<Vec<JoinHandle<()>>, MountError> {
    // Nobody waits for what comes through the device beside rings.
    let understudies = if rings.is_some() { 0 } else { UNDERSTUDIES };
    let served = Served {
        operations,
        line: Line::default(),
        understudies: Understudies::default(),
        _rings: rings,
    };
    let served = Arc::new(served);
    let threads = from.threads;
    if served.operations.fs.core.before.has_misled() {
        let mut buffer = buffer(from.request_bytes_max).map_err(MountError::Thread)?;
        let (device, gate) = (&from.descriptor, &*from.gate);
        Taker { device, gate, served: &served, threads }.take_in_left(&mut buffer);
    }
    let start_one = |number| {
        let (device, gate) = (Arc::clone(&from.descriptor), Arc::clone(&from.gate));
        let served = Arc::clone(&served);
        let mut buffer = buffer(from.request_bytes_max).map_err(MountError::Thread)?;
        start(&format!("{NAME}-{number}"), move || {
            let taker = Taker { device: &device, gate: &gate, served: &served, threads };
            if let Err(error) = taker.run(number >= threads, &mut buffer) {
                log::error!("requests cannot be read any more: {error}");
            }
        })
    };
    (0..threads + understudies).map(start_one).collect()
}

/// Memory that requests are read into. The kernel answers EIO where it finds no OS page for one, which is also what a
/// process finds that is being killed: so all of it is there, and stays.
fn buffer(request_bytes_max: u32) -> io::Result<MmapMut> {
    let length = request_bytes_max as usize + HEADER_BYTES_MAX;
    let buffer = MmapOptions::new().len(length).populate().map_anon()?;
    if let Err(error) = buffer.lock() {
        log::debug!("memory for requests is not locked: {error}");
    }
    Ok(buffer)
}

/// What a thread takes requests from and serves them with.
struct Taker<'a> {
    device: &'a Arc<OwnedFd>,
    gate: &'a Gate,
    served: &'a Served,
    /// How many serve requests.
    threads: usize,
}

/// How often a thread looks whether requests wait behind the one that it has read.
struct Looks {
    /// So many were read since several waited.
    since_crowd: u32,
}

impl Looks {
    fn is_next_due(&mut self) -> bool {
        let is_due = self.since_crowd < LOOK_EVERY || self.since_crowd.is_multiple_of(LOOK_EVERY);
        self.since_crowd = self.since_crowd.wrapping_add(1);
        is_due
    }

    fn note_crowd(&mut self) {
        self.since_crowd = 0;
    }
}

/// Why a thread takes no requests any more.
enum Leaves {
    /// Others do, and there is nothing for it to do.
    Surplus,
    /// None can be read.
    Ended(Errno),
}

impl Taker<'_> {
    /// Serves requests until the mount ends.
    fn run(&self, mut rests: bool, buffer: &mut [u8]) -> io::Result<()> {
        let understudies = &self.served.understudies;
        loop {
            if rests && !understudies.rest(|| self.do_requests_wait()) {
                return Ok(());
            }
            let reader = self.gate.enter()?;
            let mut looks = Looks { since_crowd: LOOK_EVERY };
            if rests {
                // Whose turn it is may still be in the kernel.
                self.take_in(&reader, buffer, &mut looks);
            }
            let leaves = self.serve_all(&reader, buffer, &mut looks);
            self.gate.leave(&reader);
            match leaves {
                Leaves::Surplus => rests = true,
                Leaves::Ended(Errno::ENODEV) => {
                    understudies.end();
                    return Ok(());
                }
                Leaves::Ended(error) => return Err(error.into()),
            }
        }
    }

    /// Serves requests as long as this thread is to.
    fn serve_all(&self, reader: &Reader, buffer: &mut [u8], looks: &mut Looks) -> Leaves {
        let (line, understudies) = (&self.served.line, &self.served.understudies);
        loop {
            let mut is_replaced = false;
            if let Some((user, Taken { message, in_hand, release })) = line.take() {
                take_held();
                is_replaced = self.serve(&message, in_hand);
                drop(release);
                line.charge(user, take_held());
                self.take_in(reader, buffer, looks);
            } else {
                self.gate.pass(reader);
                let is_surplus = understudies.has_surplus() && line.has_idle(self.threads);
                if is_surplus && understudies.give_up_surplus() {
                    return Leaves::Surplus;
                }
                let read = || reader.read(|| nix::unistd::read(self.device, &mut *buffer));
                match line.wait(reader.thread(), read) {
                    Some(Ok(length)) if looks.is_next_due() && self.has_more() => {
                        self.put(&buffer[..length]);
                        self.take_in(reader, buffer, looks);
                    }
                    Some(Ok(length)) => {
                        is_replaced = self.serve(&buffer[..length], self.gate.take());
                    }
                    // The request was taken back, others have called, or the gate is shut.
                    None | Some(Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN)) => {}
                    Some(Err(error)) => return Leaves::Ended(error),
                }
            }
            if is_replaced && understudies.give_up_surplus() {
                line.call_others(0);
                return Leaves::Surplus;
            }
        }
    }

    fn do_requests_wait(&self) -> bool {
        self.served.line.len() > 0 || !self.gate.is_shut() && self.has_more()
    }

    fn has_more(&self) -> bool {
        let mut watched = [PollFd::new(self.device.as_fd(), PollFlags::POLLIN)];
        poll(&mut watched, PollTimeout::ZERO) == Ok(1)
    }

    /// Takes in what the kernel has, and calls other threads for it. Where a request is taken back between the look and the
    /// read, this waits for the next one, and what it has taken in is another thread's. What fails here fails again later.
    fn take_in(&self, reader: &Reader, buffer: &mut [u8], looks: &mut Looks) {
        // A gate that is shut lets what was taken come to its end.
        while !self.gate.is_shut() && self.served.line.has_room() && self.has_more() {
            match reader.read(|| nix::unistd::read(self.device, &mut *buffer)) {
                Ok(length) => self.put(&buffer[..length]),
                Err(_) => break,
            }
        }
        if self.served.line.call_others(1) >= CROWD {
            looks.note_crowd();
            self.served.understudies.note_crowd();
        }
    }

    fn put(&self, message: &[u8]) {
        let header = InHeader::read_from_prefix(message).ok().map(|(header, _)| header);
        let user = header.as_ref().map_or(User::Kernel, User::of);
        let releases = &self.served.operations.fs.core.releases;
        let release = header.filter(|header| header.opcode == opcode::RELEASE);
        let release = release.map(|header| releases.begin(InodeId(header.nodeid)));
        let (message, in_hand) = (message.to_vec(), self.gate.take());
        self.served.line.put(user, Taken { message, in_hand, release });
        self.served.understudies.wake();
    }

    /// Serves a request; whether another thread has taken the place of this one meanwhile.
    fn serve(&self, message: &[u8], in_hand: InHand) -> bool {
        let takeovers = self.served.understudies.note_begun();
        // A fault of ours in one request must not end the thread. Who sent it gets EIO.
        let served = catch_unwind(AssertUnwindSafe(|| self.answer(message, in_hand)));
        if served.is_err() {
            log::error!("a request was not answered: an operation panicked");
        }
        self.served.understudies.note_ended(takeovers)
    }

    fn answer(&self, message: &[u8], in_hand: InHand) {
        let operations = &self.served.operations;
        let Some(request) = Request::of_message(message) else {
            return log::error!("a request of {} bytes is not whole", message.len());
        };
        let header = request.header;
        // Where others wait already, none has to be waited for.
        let lingers = is_of_train(header.opcode) && self.served.line.len() == 0;
        let _awake = lingers.then(|| operations.linger.after_reply(header.pid));
        if forget(operations, &request) {
            return;
        }
        let ticket = Ticket::new(Message::new(header.unique, self.device, in_hand));
        answer(operations, &header, take(operations, &request), ticket);
    }
}

/// Whether such a request often has others before and after it.
fn is_of_train(operation: u32) -> bool {
    matches!(
        operation,
        opcode::LOOKUP
            | opcode::GETATTR
            | opcode::RENAME
            | opcode::RENAME2
            | opcode::CREATE
            | opcode::OPEN
            | opcode::FLUSH
            | opcode::RELEASE
    )
}

thread_local! {
    /// Used again: memory from the system would cost more than what is put into it.
    static ROOM: std::cell::Cell<Vec<u8>> = const { std::cell::Cell::new(Vec::new()) };
}

/// An answer, which is written as one message.
struct Message {
    unique: u64,
    device: Arc<OwnedFd>,
    room: Vec<u8>,
    _in_hand: InHand,
}

impl Message {
    fn new(unique: u64, device: &Arc<OwnedFd>, in_hand: InHand) -> Message {
        Message { unique, device: Arc::clone(device), room: Vec::new(), _in_hand: in_hand }
    }

    fn write(&self, error: i32, bytes: &[u8]) {
        let len = u32::try_from(size_of::<OutHeader>() + bytes.len()).unwrap_or(u32::MAX);
        let header = OutHeader { len, error: -error, unique: self.unique };
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(bytes)];
        match nix::sys::uio::writev(&self.device, &parts) {
            // Nobody waits for it any more.
            Ok(_) | Err(Errno::ENOENT | Errno::ENODEV) => {}
            Err(error) => log::error!("the kernel did not take an answer: {error}"),
        }
    }
}

impl Way for Message {
    fn room(&mut self, length: usize) -> &mut [u8] {
        if self.room.is_empty() {
            self.room = ROOM.take();
        }
        if self.room.len() < length {
            self.room.resize(length, 0);
        }
        &mut self.room[..length]
    }

    fn finish(mut self, outcome: Result<usize, i32>) {
        match outcome {
            Ok(length) => self.write(0, self.room.get(..length).unwrap_or_default()),
            Err(error) => self.write(error, &[]),
        }
        let room = std::mem::take(&mut self.room);
        if !room.is_empty() {
            ROOM.set(room);
        }
    }

    fn send(self, bytes: &[u8]) {
        self.write(0, bytes);
    }
}
