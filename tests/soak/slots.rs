//! Slots that engines save and restore: replaced, renamed and removed while others read them, half-written
//! ones given up, and sequences edited for a moment, which have no slot meanwhile.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvfs::page::names;
use kvfs::reader::longest_prefix;
use kvfs_formats::slot::{Format, Head, Version, write_tensor_head};

use crate::SAVERS;
use crate::common::sys::{close, open, rename, sync_directory, write_and_close};
use crate::common::{Model, Mount, fill};
use crate::work::{Worker, of_reader, or_absent};

const SLOTS_OF_EACH: usize = 4;
const CELLS_MAX: u64 = 130;
/// The serial number of no slot; that of a slot is its first token, so no two begin alike.
const NONE: u32 = 0;

/// A name in `slots/`.
struct Slot {
    name: String,
    /// What it may be: what was there at the last sync of it, and what was tried since.
    possible: Mutex<Vec<u32>>,
}

/// All slots.
pub(crate) struct Slots {
    model: PathBuf,
    format: Format,
    /// Bytes of K and of V of a token in a layer, and how many layers there are.
    row_bytes: [usize; 2],
    layers: u32,
    all: Vec<Slot>,
    /// The next serial number.
    next: AtomicU32,
}

impl Slots {
    pub(crate) fn new(mount: &Mount, model: &Model) -> Slots {
        let geometry = model.manifest.geometry();
        let heads = u64::from(geometry.num_kv_heads());
        let row_bytes = [geometry.k_row_bytes(), geometry.v_row_bytes()];
        let slot =
            |number| Slot { name: format!("slot-{number}"), possible: Mutex::new(vec![NONE]) };
        Slots {
            model: model.directory(mount),
            format: Format::of_version(&model.manifest, Version::Three).unwrap(),
            row_bytes: row_bytes.map(|bytes| usize::try_from(heads * bytes).unwrap()),
            layers: geometry.num_layers(),
            all: (0..SAVERS * SLOTS_OF_EACH).map(slot).collect(),
            next: AtomicU32::new(NONE + 1),
        }
    }

    fn path(&self, slot: &Slot) -> PathBuf {
        self.model.join(names::SLOTS).join(format!("{}.bin", slot.name))
    }

    fn sequence(&self, slot: &Slot) -> PathBuf {
        self.model.join(names::SEQUENCES).join(&slot.name)
    }

    /// How many tokens have rows.
    fn cells(serial: u32) -> u32 {
        u32::try_from(2 + u64::from(fill(u64::from(serial), 1)[0]) % CELLS_MAX).unwrap()
    }

    /// The engine may have had a token more than it has rows.
    fn tokens(serial: u32) -> Vec<u32> {
        let ids = Slots::cells(serial) + serial % 2;
        std::iter::once(serial).chain(1..ids).collect()
    }

    /// The file of a serial number, byte for byte.
    fn make(&self, serial: u32) -> Vec<u8> {
        let (tokens, cells) = (Slots::tokens(serial), Slots::cells(serial));
        let (version, mut bytes) = (Version::Three, Vec::new());
        let head = Head { version, tokens: &tokens, cells, is_transposed: false, session: None };
        head.write(&mut bytes, &self.format).unwrap();
        for (is_v, row_bytes) in [false, true].into_iter().zip(self.row_bytes) {
            for layer in 0..self.layers {
                write_tensor_head(&mut bytes, &self.format, is_v).unwrap();
                let seed = u64::from(serial) << 8 | u64::from(layer) << 1 | u64::from(is_v);
                bytes.extend(fill(seed, cells as usize * row_bytes));
            }
        }
        bytes
    }

    /// Which slot is there; panics if its bytes are none that somebody saved.
    fn read(&self, slot: &Slot) -> io::Result<u32> {
        let path = self.path(slot);
        let Some(bytes) = or_absent(std::fs::read(&path))? else { return Ok(NONE) };
        // The magic number, the version, how many tokens there are.
        let serial = bytes.get(12..).and_then(|rest| rest.first_chunk()).copied();
        let serial = serial.map_or(NONE, u32::from_le_bytes);
        let is_known = (NONE + 1..self.next.load(Ordering::Relaxed)).contains(&serial);
        let is_whole = is_known && bytes == self.make(serial);
        assert!(is_whole, "{}: {} bytes that nobody saved", path.display(), bytes.len());
        Ok(serial)
    }

    /// What is there, for the one worker that changes it.
    #[track_caller]
    fn read_own(&self, slot: &Slot) -> io::Result<u32> {
        let serial = self.read(slot)?;
        let possible = slot.possible.lock().unwrap();
        let is_possible = possible.contains(&serial);
        assert!(
            is_possible,
            "{}: {serial}, not one of {possible:?}\n{}",
            slot.name,
            self.look(slot)
        );
        Ok(serial)
    }

    /// What there is of a slot, twice: some faults pass.
    fn look(&self, slot: &Slot) -> String {
        let list = |path: PathBuf| {
            let entries = std::fs::read_dir(&path).map(|entries| {
                entries.flatten().map(|entry| (entry.path(), entry.metadata())).collect::<Vec<_>>()
            });
            format!("{}: {entries:#?}", path.display())
        };
        let once = || {
            let opened = File::open(self.path(slot));
            let sequence = self.sequence(slot);
            let all = sequence.with_file_name("");
            format!("{opened:?}\n{}\n{}", list(all), list(sequence))
        };
        let first = once();
        std::thread::sleep(Duration::from_millis(500));
        format!("{first}\nlater: {}", once())
    }

    /// Something was answered, so it is seen.
    #[track_caller]
    fn expect(&self, slot: &Slot, serial: u32) -> io::Result<()> {
        let found = self.read(slot)?;
        assert_eq!(found, serial, "{}: what was answered is not there", slot.name);
        Ok(())
    }

    /// While nobody saves: every slot is one that may be there.
    #[track_caller]
    pub(crate) fn compare_all(&self) {
        for slot in &self.all {
            self.read_own(slot).unwrap();
        }
    }

    /// Removes all sequences, also those whose removal a kill undid, durably. What is left of saves is not
    /// this program's to remove.
    pub(crate) fn remove_all(&self) {
        let sequences = self.model.join(names::SEQUENCES);
        for entry in std::fs::read_dir(&sequences).unwrap() {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            if name.starts_with("slot-") && !name.ends_with(names::SAVING_SUFFIX) {
                std::fs::remove_dir_all(entry.path()).unwrap();
            }
        }
        sync_directory(&sequences).unwrap();
    }
}

impl Worker {
    /// Saves, restores and removes slots that are this worker's, and reads those of others.
    pub(crate) fn save(mut self, saver: usize) {
        let soak = Arc::clone(&self.soak);
        let slots = &soak.slots;
        let own = &slots.all[saver * SLOTS_OF_EACH..][..SLOTS_OF_EACH];
        let mut given_up = VecDeque::new();
        while !self.is_over() {
            {
                let _working = soak.pause.read().unwrap();
                let slot = self.random.pick(own);
                let counts = &soak.counts;
                match self.random.below(20) {
                    0 => self.note("remove a slot", self.remove_slot(slot), &counts.slots_removed),
                    1 => {
                        let other = self.random.pick(own);
                        let outcome = self.rename_slot(slot, other);
                        self.note("rename a slot", outcome, &counts.slots_renamed);
                    }
                    2 => self.note("edit a sequence", self.edit(slot), &counts.edited),
                    3 => self.note("ask", self.ask(slot), &counts.asked),
                    4 => self.begin_slot(slot, &mut given_up),
                    5..=10 => {
                        let outcome = slots.read(self.random.pick(&slots.all)).map(drop);
                        self.note("restore", outcome, &counts.restored);
                    }
                    _ => {
                        let outcome = self.save_slot(slot);
                        self.note("save", outcome, &counts.saved);
                    }
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        for file in given_up {
            self.give_up(file);
        }
    }

    fn save_slot(&mut self, slot: &Slot) -> io::Result<()> {
        let slots = &self.soak.slots;
        let serial = slots.next.fetch_add(1, Ordering::Relaxed);
        let bytes = slots.make(serial);
        let mut file = open(slots.path(slot), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC)?;
        slot.possible.lock().unwrap().push(serial);
        let piece_bytes = 1 + self.random.below(2 * bytes.len());
        bytes.chunks(piece_bytes).try_for_each(|piece| file.write_all(piece))?;
        close(file)?;
        slots.expect(slot, serial)?;
        if self.random.one_in(3) {
            sync_directory(&slots.model)?;
            *slot.possible.lock().unwrap() = vec![serial];
        }
        Ok(())
    }

    /// The name goes in one step, as a slot goes that another replaces.
    fn remove_slot(&self, slot: &Slot) -> io::Result<()> {
        let slots = &self.soak.slots;
        let sequence = slots.sequence(slot);
        let gone = sequence.with_file_name(slot.name.clone() + names::WORK_SUFFIX);
        or_absent(std::fs::remove_dir_all(&gone))?;
        slot.possible.lock().unwrap().push(NONE);
        or_absent(rename(&sequence, &gone))?;
        slots.expect(slot, NONE)?;
        or_absent(std::fs::remove_dir_all(&gone)).map(drop)
    }

    fn rename_slot(&self, slot: &Slot, to: &Slot) -> io::Result<()> {
        let slots = &self.soak.slots;
        let serial = slots.read_own(slot)?;
        if serial == NONE || slot.name == to.name {
            return Ok(());
        }
        self.remove_slot(to)?;
        slot.possible.lock().unwrap().push(NONE);
        to.possible.lock().unwrap().push(serial);
        rename(slots.sequence(slot), slots.sequence(to))?;
        slots.expect(slot, NONE)?;
        slots.expect(to, serial)
    }

    /// Moves all tokens of a sequence to later positions, and back: between it has no slot, and no prompt
    /// finds it.
    fn edit(&self, slot: &Slot) -> io::Result<()> {
        let slots = &self.soak.slots;
        let serial = slots.read_own(slot)?;
        if serial == NONE {
            return Ok(());
        }
        let ids = Slots::tokens(serial).len();
        let text = format!(
            r#"{{"schema_version":1,"edited_at":{ids},"runs":[[0,{ids},4,4]],"next":[{ids},{}]}}"#,
            ids + 4
        );
        let positions = slots.sequence(slot).join(names::POSITIONS);
        let staged = positions.with_extension("tmp");
        or_absent(std::fs::remove_file(&staged))?;
        slot.possible.lock().unwrap().push(NONE);
        write_and_close(&staged, text.as_bytes())?;
        rename(&staged, &positions)?;
        slots.expect(slot, NONE)?;
        let found = of_reader(longest_prefix(&slots.model, &Slots::tokens(serial)))?;
        assert_eq!((found.tokens, found.sequence), (0, None), "{}: it was moved", slot.name);
        slot.possible.lock().unwrap().push(serial);
        std::fs::remove_file(&positions)?;
        slots.expect(slot, serial)
    }

    /// A prompt finds the tokens that have rows, and none other.
    fn ask(&self, slot: &Slot) -> io::Result<()> {
        let slots = &self.soak.slots;
        let serial = slots.read_own(slot)?;
        if serial == NONE {
            return Ok(());
        }
        let found = of_reader(longest_prefix(&slots.model, &Slots::tokens(serial)))?;
        let expected = (u64::from(Slots::cells(serial)), Some(slots.sequence(slot)));
        assert_eq!((found.tokens, found.sequence), expected, "{}", slot.name);
        Ok(())
    }

    /// Begins to write a slot, or a question.
    fn begin_slot(&mut self, slot: &Slot, given_up: &mut VecDeque<File>) {
        let slots = &self.soak.slots;
        let bytes = slots.make(slots.next.fetch_add(1, Ordering::Relaxed));
        let begun = if self.random.one_in(3) {
            open(slots.model.join(names::PREFIXES).join("match"), libc::O_RDWR)
        } else {
            open(slots.path(slot), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC)
        };
        // Whole tokens.
        self.begin(begun, &bytes[..bytes.len() / 2 / 4 * 4], given_up);
    }
}
