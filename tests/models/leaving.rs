//! A copy in memory is written out, changed and needed for its space at the same time
//! (`crates/storage/src/tier/ram`), in the order in which `shuttle` lets threads go on: the newest bytes are in memory
//! or on the disk.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use kvfs::store::disk::Access;
use kvfs::store::record::ObjectId;
use kvfs::tier::counters::Counters;
use shuttle::sync::Mutex;
use shuttle::thread;

use super::tier::ram::RamTier;
use super::try_interleavings;

const COPY: ObjectId = ObjectId(1);
const BYTES: u64 = 4096;

/// What the state of a mount knows of the file.
#[derive(Default)]
struct State {
    is_changing: bool,
    is_to_be_published: bool,
}

struct Mount {
    ram: RamTier,
    state: Mutex<State>,
    /// Held by whoever commits.
    turn: Mutex<()>,
    /// The first byte that the disk has.
    disk: Mutex<Option<u8>>,
}

impl Mount {
    fn new() -> Mount {
        let ram = RamTier::open(BYTES, Counters::default()).unwrap();
        let file = ram.create(COPY, BYTES, Access::ReadWrite).unwrap().expect("it is empty");
        file.write_all_at(&[1], 0).unwrap();
        let state = State { is_to_be_published: true, ..State::default() };
        Mount { ram, state: Mutex::new(state), turn: Mutex::new(()), disk: Mutex::new(None) }
    }

    fn byte(&self) -> Option<u8> {
        let file = self.ram.open_copy(COPY, Access::Read)?.unwrap();
        let mut byte = [0];
        assert_eq!(file.read_at(&mut byte, 0).unwrap(), 1);
        Some(byte[0])
    }

    /// As `fs::commit` does it.
    fn commit(&self) {
        let _turn = self.turn.lock().unwrap();
        {
            let mut state = self.state.lock().unwrap();
            if !std::mem::take(&mut state.is_to_be_published) {
                return;
            }
        }
        let flushed = self.ram.dirty_version(COPY).inspect(|_| {
            thread::yield_now();
            *self.disk.lock().unwrap() = self.byte();
        });
        let state = self.state.lock().unwrap();
        if let Some(version) = flushed.filter(|_| !state.is_changing) {
            self.ram.make_clean(COPY, version);
        }
    }

    /// As `fs::open` does it, the client that writes, and `fs::settle`.
    fn change(&self, byte: u8, settles: bool) {
        {
            let mut state = self.state.lock().unwrap();
            self.ram.make_dirty(COPY);
            state.is_changing = true;
        }
        match self.ram.open_copy(COPY, Access::ReadWrite) {
            Some(file) => file.unwrap().write_all_at(&[byte], 0).unwrap(),
            None => *self.disk.lock().unwrap() = Some(byte),
        }
        let mut state = self.state.lock().unwrap();
        if settles {
            self.ram.note_at_rest(COPY);
        }
        (state.is_changing, state.is_to_be_published) = (false, true);
    }
}

fn commit_change_and_make_room(settles: bool) {
    let mount = Arc::new(Mount::new());
    let spawn = |act: fn(&Mount, bool)| {
        let mount = Arc::clone(&mount);
        thread::spawn(move || act(&mount, settles))
    };
    let threads = [
        spawn(|mount, _| mount.commit()),
        spawn(|mount, settles| mount.change(2, settles)),
        spawn(|mount, _| mount.commit()),
        spawn(|mount, _| {
            for object in 2..5 {
                // Finds room only where the copy has left.
                drop(mount.ram.create(ObjectId(object), BYTES, Access::ReadWrite).unwrap());
                assert!(mount.ram.usage().used_bytes <= BYTES);
            }
        }),
    ];
    for thread in threads {
        thread.join().unwrap();
    }
    mount.commit();
    let in_memory = mount.byte();
    assert_eq!(in_memory.or(*mount.disk.lock().unwrap()), Some(2), "the change is lost");
    assert_eq!(*mount.disk.lock().unwrap(), Some(2), "a commit left it out");
}

#[test]
fn the_newest_bytes_are_in_memory_or_on_the_disk() {
    try_interleavings("leaving", || commit_change_and_make_room(true));
}

#[test]
fn a_commit_under_way_would_take_the_last_bytes_for_its_own() {
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        try_interleavings("leaving", || commit_change_and_make_room(false));
    }));
    assert!(outcome.is_err(), "the test above proves nothing");
}
