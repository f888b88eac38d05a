//! Files that are known to be damaged, kept with the root: a mount that begins anew, or a daemon that takes the place of
//! one that was killed, knows what was found before.

use crate::core::Core;
use crate::core::state::State;
use crate::on_corrupt::Damaged;
use kvfs_storage::store::StoreError;
use kvfs_storage::store::record::{InodeId, ObjectId};

/// Kept as an attribute of the root, which is not listed: an inode and an object of eight bytes each for every file.
pub(crate) const KNOWN_DAMAGE: &[u8] = b"user.kvfs.known_damage";
const RECORD_BYTES: usize = 16;
/// As many as an attribute may have. Of more the last ones are found again by a scrub alone.
const RECORDS_MAX: usize = (64 << 10) / RECORD_BYTES;

/// What is on record, for a mount that begins.
pub(crate) fn put_into(state: &mut State) -> Result<(), StoreError> {
    let bytes = state.metadata.attribute(InodeId::ROOT, KNOWN_DAMAGE)?.unwrap_or_default();
    let records = bytes.as_chunks::<RECORD_BYTES>().0.iter();
    state.recorded_damage = records.map(decode).collect();
    state.known_damage = state.recorded_damage.clone();
    Ok(())
}

fn decode(record: &[u8; RECORD_BYTES]) -> (InodeId, ObjectId) {
    let half = |from: usize| u64::from_le_bytes(std::array::from_fn(|index| record[from + index]));
    (InodeId(half(0)), ObjectId(half(RECORD_BYTES / 2)))
}

fn encode(damaged: &Damaged) -> Vec<u8> {
    let mut records: Vec<_> = damaged.iter().map(|(id, object)| (id.0, object.0)).collect();
    records.sort_unstable();
    records.truncate(RECORDS_MAX);
    let halves = records.into_iter().flat_map(|(id, object)| [id, object]);
    halves.flat_map(u64::to_le_bytes).collect()
}

/// Puts on record what is known by now, durable with the next commit, if it is something else than before.
pub(crate) fn record(core: &Core) {
    let mut state = core.state();
    let state = &mut *state;
    state.count_known_damage();
    if state.refusal.is_some() || state.known_damage == state.recorded_damage {
        return;
    }
    let life = state.metadata.life(InodeId::ROOT);
    if state.known_damage.is_empty() {
        state.metadata.remove_attribute(life, InodeId::ROOT, KNOWN_DAMAGE);
    } else {
        let records = encode(&state.known_damage);
        state.metadata.put_attribute(life, InodeId::ROOT, KNOWN_DAMAGE, &records);
    }
    state.recorded_damage.clone_from(&state.known_damage);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::unmounted::{FILES, Unmounted};

    fn known(unmounted: &Unmounted) -> Vec<InodeId> {
        let mut state = unmounted.fs.core.state();
        state.count_known_damage();
        let mut known: Vec<_> = state.known_damage.keys().copied().collect();
        known.sort_unstable();
        known
    }

    #[test]
    fn it_outlives_the_mount_and_the_daemon_until_it_is_mended() {
        let unmounted = Unmounted::new();
        let ids = ["a", "b"].map(|name| unmounted.write(FILES, name, b"bytes"));
        unmounted.fs.commit().unwrap();
        let object = |id| {
            let inode = unmounted.fs.core.state().inode(id).unwrap();
            inode.file().unwrap().object.unwrap()
        };
        for id in ids {
            unmounted.fs.residency().note_damage(id, object(id), true);
        }
        unmounted.fs.commit().unwrap();
        let unmounted = unmounted.after_crash();
        assert_eq!(known(&unmounted), ids);
        let unmounted = unmounted.again();
        assert_eq!(known(&unmounted), ids);
        let object = unmounted.fs.core.state().known_damage[&ids[0]];
        unmounted.fs.residency().note_damage(ids[0], object, false);
        unmounted.fs.unlink(&crate::unmounted::place(FILES, "b")).unwrap();
        let unmounted = unmounted.again();
        assert_eq!(known(&unmounted), []);
        let kept = unmounted.fs.core.state().metadata.attribute(InodeId::ROOT, KNOWN_DAMAGE);
        assert_eq!(kept.unwrap(), None);
        let listed = unmounted.fs.list_extended_attributes(InodeId::ROOT, crate::Caller::DAEMON);
        assert_eq!(listed.unwrap(), b"");
    }

    #[test]
    fn as_many_are_kept_as_an_attribute_has_room_for() {
        let all: Damaged = (0..10_000).map(|id| (InodeId(id), ObjectId(u64::MAX - id))).collect();
        let kept = encode(&all);
        assert_eq!(kept.len(), 64 << 10);
        let found: Damaged = kept.as_chunks().0.iter().map(decode).collect();
        assert_eq!(found.len(), RECORDS_MAX);
        assert!(found.iter().all(|(id, object)| all[id] == *object && id.0 < 4096));
    }
}
