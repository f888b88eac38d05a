//! Requests that come through `/dev/fuse`.
//!
//! All threads read from one descriptor, of which there is no clone (`FUSE_DEV_IOC_CLONE`): what was read through
//! a clone ends with it.

use std::io::{self, IoSlice};
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::thread::JoinHandle;

use memmap2::{MmapMut, MmapOptions};
use nix::errno::Errno;
use zerocopy::IntoBytes;

use super::background::start;
use super::dispatch::Operations;
use super::gate::{Gate, InHand, Reader};
use super::mount::MountError;
use super::protocol::wire::{OutHeader, opcode};
use super::protocol::{Request, Ticket, Way, answer, forget, take};
use super::ring::Running;

/// Largest request without passthrough: beyond 1 MiB copying costs more than round trips.
pub(super) const WRITE_BYTES_MAX: u32 = 1 << 20;

/// What comes before the bytes of a write, and more: the kernel asks for room for it (`fuse_dev_do_read`).
const HEADER_BYTES_MAX: usize = 4096;

/// Name of the threads, before their number.
const NAME: &str = "kvfs-device";

/// What the threads share. When the last of them ends, the kernel has let the mount go: rings and whatever else
/// uses the operations end then.
struct Served {
    operations: Arc<Operations>,
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
    let served = Arc::new(Served { operations, _rings: rings });
    let start_one = |number| {
        let (device, gate) = (Arc::clone(&from.descriptor), Arc::clone(&from.gate));
        let served = Arc::clone(&served);
        let mut buffer = buffer(from.request_bytes_max).map_err(MountError::Thread)?;
        start(&format!("{NAME}-{number}"), move || {
            if let Err(error) = run(&device, &gate, &served.operations, &mut buffer) {
                log::error!("requests cannot be read any more: {error}");
            }
        })
    };
    (0..from.threads).map(start_one).collect()
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

fn run(
    device: &Arc<OwnedFd>, gate: &Gate, operations: &Operations, buffer: &mut [u8],
) -> io::Result<()> {
    let reader = gate.enter()?;
    let outcome = read_all(device, (gate, &reader), operations, buffer);
    gate.leave(&reader);
    Ok(outcome?)
}

fn read_all(
    device: &Arc<OwnedFd>, (gate, reader): (&Gate, &Reader), operations: &Operations,
    buffer: &mut [u8],
) -> nix::Result<()> {
    loop {
        gate.pass(reader);
        let length = match reader.read(|| nix::unistd::read(device, &mut *buffer)) {
            Ok(length) => length,
            // The request was taken back, or there is none.
            Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => continue,
            // The mount has ended.
            Err(Errno::ENODEV) => return Ok(()),
            Err(error) => return Err(error),
        };
        serve_one((device, gate), operations, &buffer[..length]);
    }
}

fn serve_one((device, gate): (&Arc<OwnedFd>, &Gate), operations: &Operations, message: &[u8]) {
    let Some(request) = Request::of_message(message) else {
        return log::error!("a request of {} bytes is not whole", message.len());
    };
    let header = request.header;
    let _awake = is_of_train(header.opcode).then(|| operations.linger.after_reply(header.pid));
    // A fault of ours in one request must not end the thread. Who sent it gets EIO.
    let served = catch_unwind(AssertUnwindSafe(|| {
        if forget(operations, &request) {
            return;
        }
        let ticket = Ticket::new(Message::new(header.unique, device, gate.take()));
        answer(operations, &header, take(operations, &request), ticket);
    }));
    if served.is_err() {
        log::error!("a request was not answered: an operation panicked");
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
