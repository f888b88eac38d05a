//! Where each object in a pack is: what the records say, in memory. Some 100 bytes per object.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use super::holes::Hollow;
use super::opening::Pack;
use super::record::{HEADER_BYTES, Header, Kind, Place, record_bytes};
use crate::store::disk::shard;
use crate::store::record::{ObjectId, Time};

/// Where the bytes of an object are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) place: Place,
    /// Bytes.
    pub(super) length: u32,
    pub(super) mtime: Time,
    /// What is noted of it, and the bytes of that.
    pub(super) note: Option<(Place, u32)>,
    /// Somebody changes a copy in a file of its own: these are the bytes after a crash, and nothing until then.
    pub(super) is_hidden: bool,
}

impl Entry {
    /// Where its bytes end in the pack.
    pub(super) fn end(&self) -> u64 {
        u64::from(self.place.offset) + HEADER_BYTES + u64::from(self.length)
    }

    /// Whether a header at its place is that of an object's bytes.
    pub(super) fn is_of(&self, object: ObjectId, header: &Header) -> bool {
        header.kind == Kind::Bytes
            && header.object == object
            && header.length == u64::from(self.length)
            && header.mtime == self.mtime
    }
}

/// A pack, and how much of it is worth keeping.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) pack: Arc<Pack>,
    /// Bytes of its records.
    pub(super) bytes: u64,
    /// Sum of their headers' checksums.
    sum: u64,
    /// Bytes of those that are valid.
    pub(super) live_bytes: u64,
    /// The holes in it.
    pub(super) hollow: Hollow,
    pub(super) condition: Condition,
}

/// What became of a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Condition {
    /// Nothing is known to be wrong with it.
    Sound,
    /// It could not be read whole: it stays as it is, and keeps nobody from the others.
    SetAside,
    /// Somebody has removed it below the mount.
    Lost,
}

impl Known {
    pub(super) fn is_lost(&self) -> bool {
        self.condition == Condition::Lost
    }

    /// Whether a complete pack has the records that are known of it, and no others.
    pub(super) fn is_of(&self, end: u64, sum: u64) -> bool {
        (self.bytes, self.sum) == (end, sum)
    }
}

/// What tells some records from all others, and is added to that of others.
pub(super) fn sum_of(records: &[(Place, Header)]) -> u64 {
    let sums = records.iter().map(|(place, header)| header.own_checksum(*place));
    sums.fold(0, u64::wrapping_add)
}

/// All objects in packs. They are kept by the directory that would hold their files.
#[derive(Debug)]
pub(super) struct Index {
    shards: Vec<HashMap<ObjectId, Entry>>,
    /// Entries that are hidden.
    hidden: usize,
    pub(super) packs: BTreeMap<u32, Known>,
}

/// A record of an object's bytes that is not valid any more, and that no record says so of.
pub(super) type Dead = (ObjectId, Place);

/// What has to be known besides while records are read.
#[derive(Debug, Default)]
pub(super) struct Replay {
    /// Bytes of objects that have others by what the records say, the newest last. They count again if those turn out
    /// to be gone: of a copy that nobody was told to have, for one.
    covered: HashMap<ObjectId, Vec<Entry>>,
    /// The newest note of objects whose bytes have not come yet: they were copied out of an older pack after it.
    notes: HashMap<ObjectId, (Place, Header)>,
}

impl Replay {
    /// After all records, what is still covered is not valid any more.
    pub(super) fn into_dead(self) -> impl Iterator<Item = Dead> {
        let all = self.covered.into_iter();
        all.flat_map(|(object, entries)| {
            entries.into_iter().map(move |entry| (object, entry.place))
        })
    }
}

impl Index {
    pub(super) fn new() -> Index {
        let shards = (0..=u8::MAX).map(|_| HashMap::new()).collect();
        Index { shards, hidden: 0, packs: BTreeMap::new() }
    }

    fn of(&self, object: ObjectId) -> &HashMap<ObjectId, Entry> {
        &self.shards[usize::from(shard(object))]
    }

    fn of_mut(&mut self, object: ObjectId) -> &mut HashMap<ObjectId, Entry> {
        &mut self.shards[usize::from(shard(object))]
    }

    pub(super) fn get(&self, object: ObjectId) -> Option<&Entry> {
        self.of(object).get(&object)
    }

    /// Where the bytes are that an object has now, if it has no file of its own.
    pub(super) fn visible(&self, object: ObjectId) -> Option<&Entry> {
        self.get(object).filter(|entry| !entry.is_hidden)
    }

    /// The objects that would lie in a directory.
    pub(super) fn objects(&self, shard: u8) -> impl Iterator<Item = ObjectId> {
        let visible = self.shards[usize::from(shard)].iter().filter(|(_, entry)| !entry.is_hidden);
        visible.map(|(object, _)| *object)
    }

    /// Objects whose bytes are in packs, and in no file of their own.
    pub(super) fn len(&self) -> usize {
        self.shards.iter().map(HashMap::len).sum::<usize>() - self.hidden
    }

    /// What a record of a pack says, in the order in which they were written.
    pub(super) fn replay(&mut self, at: Place, header: &Header, replay: &mut Replay) {
        let object = header.object;
        match header.kind {
            Kind::Bytes => {
                let old = self.get(object).copied();
                self.put(at, header);
                if let Some(old) = old {
                    replay.covered.entry(object).or_default().push(old);
                } else if let Some((place, note)) = replay.notes.remove(&object) {
                    self.note(place, &note);
                }
            }
            Kind::Note if self.get(object).is_some() => self.note(at, header),
            Kind::Note => drop(replay.notes.insert(object, (at, *header))),
            Kind::Gone(place) if self.get(object).is_some_and(|entry| entry.place == place) => {
                let note = self.remove(object).and_then(|entry| entry.note);
                if let Some(old) = replay.covered.get_mut(&object).and_then(Vec::pop) {
                    self.restore(object, Entry { note, ..old });
                }
            }
            Kind::Gone(place) => {
                if let Some(entries) = replay.covered.get_mut(&object) {
                    entries.retain(|entry| entry.place != place);
                }
            }
            Kind::Index | Kind::End(_) => {}
        }
    }

    fn set(&mut self, object: ObjectId, entry: Entry) {
        self.hidden += usize::from(entry.is_hidden);
        let old = self.of_mut(object).insert(object, entry);
        self.hidden -= usize::from(old.is_some_and(|old| old.is_hidden));
    }

    fn restore(&mut self, object: ObjectId, entry: Entry) {
        self.set(object, entry);
        self.count(entry.place, record_bytes(u64::from(entry.length)), true);
        if let Some((note, length)) = entry.note {
            self.count(note, record_bytes(u64::from(length)), true);
        }
    }

    /// The bytes of an object are there from now on. Returns where they were before.
    pub(super) fn put(&mut self, place: Place, header: &Header) -> Option<Dead> {
        let Ok(length) = u32::try_from(header.length) else { return None };
        let old = self.get(header.object).copied();
        let note = old.and_then(|old| old.note);
        let is_hidden = self.is_lost(place.pack);
        self.set(header.object, Entry { place, length, mtime: header.mtime, note, is_hidden });
        self.count(place, record_bytes(header.length), true);
        let old = old?;
        self.count(old.place, record_bytes(u64::from(old.length)), false);
        (old.place != place).then_some((header.object, old.place))
    }

    /// What is noted of an object is there from now on.
    pub(super) fn note(&mut self, place: Place, header: &Header) {
        let Ok(length) = u32::try_from(header.length) else { return };
        let Some(entry) = self.of_mut(header.object).get_mut(&header.object) else { return };
        let old = entry.note.replace((place, length));
        self.count(place, record_bytes(header.length), true);
        if let Some((old, length)) = old {
            self.count(old, record_bytes(u64::from(length)), false);
        }
    }

    /// A record has been copied. Whether an object still counted on it: it counts on the copy now.
    pub(super) fn relocate(&mut self, from: Place, to: Place, header: &Header) -> bool {
        let Some(mut entry) = self.get(header.object).copied() else { return false };
        match (header.kind, &mut entry.note) {
            (Kind::Bytes, _) if entry.place == from => {
                entry.place = to;
                entry.is_hidden |= self.is_lost(to.pack);
            }
            (Kind::Note, Some((note, _))) if *note == from => *note = to,
            _ => return false,
        }
        self.set(header.object, entry);
        self.count(from, header.record_bytes(), false);
        self.count(to, header.record_bytes(), true);
        true
    }

    /// An object is in no pack any more.
    pub(super) fn remove(&mut self, object: ObjectId) -> Option<Entry> {
        let entry = self.of_mut(object).remove(&object)?;
        self.hidden -= usize::from(entry.is_hidden);
        self.count(entry.place, record_bytes(u64::from(entry.length)), false);
        if let Some((note, length)) = entry.note {
            self.count(note, record_bytes(u64::from(length)), false);
        }
        Some(entry)
    }

    pub(super) fn hide(&mut self, object: ObjectId) {
        if let Some(entry) = self.get(object) {
            self.set(object, Entry { is_hidden: true, ..*entry });
        }
    }

    pub(super) fn add_pack(&mut self, pack: Pack) {
        self.packs.insert(
            pack.number,
            Known {
                pack: Arc::new(pack),
                bytes: 0,
                sum: 0,
                live_bytes: 0,
                hollow: Hollow::default(),
                condition: Condition::Sound,
            },
        );
    }

    /// A pack is gone, and what was in it: so many objects. `None` if that is known. What its records say is said again by a
    /// pack that comes back, so whatever comes in their place is noted as if it were there.
    pub(super) fn lose(&mut self, pack: u32) -> Option<usize> {
        self.packs.get_mut(&pack).filter(|known| !known.is_lost())?.condition = Condition::Lost;
        let mut objects = 0;
        for entry in self.shards.iter_mut().flat_map(HashMap::values_mut) {
            if entry.place.pack == pack && !entry.is_hidden {
                entry.is_hidden = true;
                objects += 1;
            }
            if entry.note.is_some_and(|(note, _)| note.pack == pack) {
                entry.note = None;
            }
        }
        self.hidden += objects;
        Some(objects)
    }

    /// A pack has become longer, by so many bytes of records of this sum.
    pub(super) fn grow(&mut self, pack: u32, bytes: u64, sum: u64) {
        if let Some(known) = self.packs.get_mut(&pack) {
            known.bytes += bytes;
            known.sum = known.sum.wrapping_add(sum);
        }
    }

    fn is_lost(&self, pack: u32) -> bool {
        self.packs.get(&pack).is_some_and(Known::is_lost)
    }

    /// A pack, if it is there.
    pub(super) fn pack(&self, number: u32) -> Option<Arc<Pack>> {
        let known = self.packs.get(&number).filter(|known| !known.is_lost());
        known.map(|known| Arc::clone(&known.pack))
    }

    /// Whether a record of a pack is worth keeping.
    pub(super) fn is_valid(&self, place: Place, header: &Header) -> bool {
        match header.kind {
            Kind::Bytes => self
                .get(header.object)
                .is_some_and(|entry| entry.place == place && entry.is_of(header.object, header)),
            Kind::Note => self
                .get(header.object)
                .and_then(|entry| entry.note)
                .is_some_and(|(note, _)| note == place),
            // As long as there is what it is about.
            Kind::Gone(of) => of.pack != place.pack && self.packs.contains_key(&of.pack),
            Kind::Index | Kind::End(_) => false,
        }
    }

    fn count(&mut self, place: Place, bytes: u64, is_live: bool) {
        if let Some(known) = self.packs.get_mut(&place.pack) {
            known.live_bytes = if is_live {
                known.live_bytes + bytes
            } else {
                known.live_bytes.saturating_sub(bytes)
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_of_an_entry_if_all_of_it_is() {
        let mtime = Time { seconds: 7, nanoseconds: 1 };
        let object = ObjectId(3);
        let entry = Entry {
            place: Place { pack: 1, offset: 64 },
            length: 5,
            mtime,
            note: None,
            is_hidden: false,
        };
        let header = Header::of(Kind::Bytes, object, mtime, b"bytes");
        assert!(entry.is_of(object, &header));
        assert!(!entry.is_of(ObjectId(4), &header));
        let others = [
            Header { kind: Kind::Note, ..header },
            Header { object: ObjectId(4), ..header },
            Header { length: 6, ..header },
            Header { mtime: Time { nanoseconds: 2, ..mtime }, ..header },
        ];
        for other in others {
            assert!(!entry.is_of(object, &other), "{other:?}");
        }
    }
}
