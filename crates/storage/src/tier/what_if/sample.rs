//! The uses that are remembered: of all objects at first, then of fewer, or of a shorter time.
//!
//! **Bounds.** There is room for 327,680 records of 16 bytes, 5 MiB, which is taken as they come. When it is used up, half of the
//! objects are forgotten (those that stay are chosen by their hash, so all uses of one are there or none is), unless the
//! sample has so few that half of them would tell little; then the older half of the records goes. An object that
//! is used over and over would fill the room alone; its uses in a row take two records.
//!
//! **Who waits.** One use adds a record and moves 64 at most, under a lock of its own. Parts of records are shared with
//! whoever asks, and copied only if they change meanwhile.

use std::collections::VecDeque;
use std::fmt::Write;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use super::record::{Happened, RECORD_BYTES, Record, is_sampled, spread};
use super::seen::FIRST_LINE;
use crate::store::record::{ObjectId, Role};

/// Records of a part.
const PART: usize = 4096;
/// Parts, of 64 KiB each: 5 MiB together. Who asks needs as much again, and twice for a moment.
const PARTS_MAX: usize = 80;
/// With fewer objects than about so many the older half goes, not half of the objects.
const OBJECTS_MIN: usize = 8000;
/// Bits of the set that tells how many objects there are.
const SEEN_BITS: usize = 1 << 17;
/// Records that one use moves at most.
const MOVED_AT_ONCE: usize = 64;
/// Models whose tokens are told.
const MODELS_MAX: usize = 32;
/// 64 layers each.
const LAYER_WORDS: usize = 64;

/// What was seen of the uses of a mount.
#[derive(Debug)]
pub struct Sample {
    held: Mutex<Held>,
}

#[derive(Debug)]
struct Held {
    parts: VecDeque<Part>,
    parts_max: usize,
    objects_min: usize,
    /// Records of all parts.
    length: usize,
    /// One in 2^bits objects is in the sample.
    bits: u32,
    thinning: Option<Thinning>,
    /// The first records are not those that came first.
    is_cut: bool,
    now: Totals,
    /// The object that was used last, if nothing happened since.
    last: Option<u64>,
    objects: Objects,
    models: Vec<Model>,
}

/// Some records in a row, and what had been counted before them.
#[derive(Debug)]
struct Part {
    records: Arc<Vec<Record>>,
    before: Totals,
    since: Instant,
}

/// All uses, remembered or not.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    uses: u64,
    bytes: u64,
}

/// Objects are being forgotten: records up to `write` are those of objects that stay, those from `read` on are to be
/// looked at.
#[derive(Debug)]
struct Thinning {
    read: usize,
    write: usize,
}

/// Roughly how many objects there are: linear counting (Whang et al., TODS 1990).
#[derive(Debug)]
struct Objects {
    words: Vec<u64>,
    ones: usize,
}

/// A model, and the layers of which there were pages.
#[derive(Debug)]
struct Model {
    identity: [u8; 16],
    layers: Box<[u64; LAYER_WORDS]>,
}

impl Default for Sample {
    fn default() -> Sample {
        Sample::with_room(PARTS_MAX, OBJECTS_MIN)
    }
}

impl Sample {
    /// One with room for so many parts of 4096 records, that forgets by time where it has fewer objects than the second
    /// number.
    pub fn with_room(parts_max: usize, objects_min: usize) -> Sample {
        let held = Held {
            parts: VecDeque::new(),
            parts_max,
            objects_min,
            length: 0,
            bits: 0,
            thinning: None,
            is_cut: false,
            now: Totals::default(),
            last: None,
            objects: Objects { words: vec![0; SEEN_BITS / 64], ones: 0 },
            models: Vec::new(),
        };
        Sample { held: Mutex::new(held) }
    }

    /// An object is sealed or at rest for the first time, or with other bytes.
    pub fn came_to_be(&self, object: ObjectId, role: Role, bytes: u64) {
        let is_page = matches!(role, Role::Page(_));
        let what = if is_page { Happened::NewPage } else { Happened::NewFile };
        self.held().note(object, what, bytes, Some(role));
    }

    /// An object was opened to be read, or read whole. Who does not know its role has opened it before.
    pub fn used(&self, object: ObjectId, role: Option<Role>, bytes: u64, in_memory: bool) {
        let what = if in_memory { Happened::UsedInMemory } else { Happened::Used };
        let mut held = self.held();
        if held.last == Some(object.0) {
            held.used_again(object);
        } else {
            held.note(object, what, bytes, role);
            held.last = Some(object.0);
        }
        held.now.uses += 1;
        held.now.bytes = held.now.bytes.saturating_add(bytes);
    }

    /// Something else happened to an object.
    pub fn note(&self, object: ObjectId, what: Happened, bytes: u64) {
        self.held().note(object, what, bytes, None);
    }

    /// What a question is answered with: some lines, and the records. [`Seen::parse`](super::Seen::parse) reads it.
    pub fn to_bytes(&self) -> Vec<u8> {
        let (parts, head) = {
            let held = self.held();
            (held.shared(), held.head())
        };
        let length: usize = parts.iter().map(|(records, from, to)| records[*from..*to].len()).sum();
        let mut bytes = Vec::with_capacity(head.len() + length * RECORD_BYTES);
        bytes.extend_from_slice(head.as_bytes());
        for (records, from, to) in parts {
            for record in &records[from..to] {
                bytes.extend_from_slice(&record.to_le_bytes());
            }
        }
        bytes
    }

    /// Bytes that its records take.
    #[cfg(test)]
    pub(super) fn memory_bytes(&self) -> usize {
        let held = self.held();
        let records = held.parts.iter().map(|part| part.records.capacity() * RECORD_BYTES);
        records.sum::<usize>() + held.objects.words.len() * 8
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Held {
    fn note(&mut self, object: ObjectId, what: Happened, bytes: u64, role: Option<Role>) {
        self.last = None;
        let record = Record::new(object.0, what, bytes);
        if !is_sampled(record.object(), self.bits) {
            return;
        }
        let record = match role {
            Some(Role::Page(page)) => {
                record.of_page(self.model(page.model, page.layer), page.tokens)
            }
            _ => record,
        };
        self.add(record);
    }

    /// The object that was used last is used again.
    fn used_again(&mut self, object: ObjectId) {
        let mut again = Record::new(object.0, Happened::UsedAgain, 0);
        again.tokens = 1;
        if !is_sampled(again.object(), self.bits) {
            return;
        }
        let last =
            self.parts.back_mut().and_then(|part| Arc::make_mut(&mut part.records).last_mut());
        match last.filter(|last| last.is_like(again)) {
            Some(last) => last.tokens = last.tokens.saturating_add(1),
            None => self.add(again),
        }
    }

    fn add(&mut self, record: Record) {
        if self.length == self.parts.len() * PART {
            let (records, since) = (Arc::new(Vec::with_capacity(PART)), Instant::now());
            self.parts.push_back(Part { records, before: self.now, since });
        }
        if let Some(part) = self.parts.back_mut() {
            Arc::make_mut(&mut part.records).push(record);
            self.length += 1;
        }
        self.objects.add(record.object());
        // What comes while objects are forgotten has room until all were looked at.
        let room = self.parts_max * PART;
        if self.thinning.is_some() {
            self.thin();
        } else if self.length >= room - room / MOVED_AT_ONCE - 1 {
            self.forget();
        }
    }

    /// The number of a model, from 1; 0 where there are too many.
    fn model(&mut self, identity: [u8; 16], layer: u32) -> u8 {
        let known = self.models.iter().position(|model| model.identity == identity);
        let at = known.unwrap_or(self.models.len());
        if at == MODELS_MAX {
            return 0;
        }
        if known.is_none() {
            self.models.push(Model { identity, layers: Box::new([0; LAYER_WORDS]) });
        }
        if let Some(word) = self.models[at].layers.get_mut(layer as usize / 64) {
            *word |= 1 << (layer % 64);
        }
        u8::try_from(at + 1).unwrap_or(0)
    }

    /// The room is used up.
    fn forget(&mut self) {
        if self.objects.ones >= self.objects_min {
            self.bits += 1;
            self.thinning = Some(Thinning { read: 0, write: 0 });
        } else {
            let older = self.parts.len() / 2;
            self.parts.drain(..older);
            self.length -= older * PART;
            self.is_cut = true;
        }
        self.objects.clear();
    }

    /// Goes on forgetting objects.
    fn thin(&mut self) {
        let Some(Thinning { mut read, mut write }) = self.thinning.take() else { return };
        for _ in 0..MOVED_AT_ONCE {
            if read == self.length {
                return self.end_thinning(write);
            }
            let part = &self.parts[read / PART];
            let (record, before, since) = (part.records[read % PART], part.before, part.since);
            read += 1;
            if !is_sampled(record.object(), self.bits) {
                continue;
            }
            let target = &mut self.parts[write / PART];
            if write.is_multiple_of(PART) {
                (target.before, target.since) = (before, since);
            }
            Arc::make_mut(&mut target.records)[write % PART] = record;
            write += 1;
            self.objects.add(record.object());
        }
        self.thinning = Some(Thinning { read, write });
    }

    fn end_thinning(&mut self, length: usize) {
        self.length = length;
        self.parts.truncate(length.div_ceil(PART));
        let in_last = length - self.parts.len().saturating_sub(1) * PART;
        if let Some(part) = self.parts.back_mut() {
            Arc::make_mut(&mut part.records).truncate(in_last);
        }
    }

    /// The records, in parts of which some are from one place to another.
    fn shared(&self) -> Vec<(Arc<Vec<Record>>, usize, usize)> {
        let all = [(0, self.length), (0, 0)];
        let ranges = self
            .thinning
            .as_ref()
            .map_or(all, |Thinning { read, write }| [(0, *write), (*read, self.length)]);
        let mut shared = Vec::new();
        for (begin, end) in ranges.into_iter().filter(|(begin, end)| begin < end) {
            for at in begin / PART..end.div_ceil(PART) {
                let from = begin.max(at * PART) - at * PART;
                let to = end.min((at + 1) * PART) - at * PART;
                shared.push((Arc::clone(&self.parts[at].records), from, to));
            }
        }
        shared
    }

    fn head(&self) -> String {
        let first = self.parts.front();
        let before = first.map_or(Totals::default(), |part| part.before);
        let seconds = first.map_or(0, |part| part.since.elapsed().as_secs());
        let layers = self.models.iter().map(|model| model.count().to_string());
        let layers = layers.collect::<Vec<_>>().join(" ");
        let uses = self.now.uses - before.uses;
        let bytes = self.now.bytes.saturating_sub(before.bytes);
        let mut text = format!("{FIRST_LINE}\n");
        // Writing to a String cannot fail.
        let _ = write!(
            text,
            "sampling_bits: {}\nuses: {uses}\nused_bytes: {bytes}\nseconds: {seconds}\nis_whole: {}\nlayers: {layers}\n\n",
            self.bits, !self.is_cut
        );
        text
    }
}

impl Model {
    fn count(&self) -> u32 {
        self.layers.iter().map(|word| word.count_ones()).sum()
    }
}

impl Objects {
    fn add(&mut self, object: u64) {
        #[expect(clippy::cast_possible_truncation, reason = "the low bits of a hash are one")]
        let bit = spread(object) as usize % SEEN_BITS;
        let (word, mask) = (&mut self.words[bit / 64], 1 << (bit % 64));
        self.ones += usize::from(*word & mask == 0);
        *word |= mask;
    }

    fn clear(&mut self) {
        self.words.fill(0);
        self.ones = 0;
    }
}
