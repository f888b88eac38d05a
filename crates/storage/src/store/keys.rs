//! Keys of the records in `meta.redb`: one ordered byte string each, numbers big-endian so that
//! the order of bytes is the order of numbers.
//!
//! | key | value |
//! |---|---|
//! | `I` inode(8) | [`Inode`](super::record::Inode) |
//! | `E` parent(8) hash(8) name | [`Entry`](super::record::Entry) |
//! | `X` inode(8) name | bytes of the extended attribute |
//! | `O` object(8) | [`ObjectRecord`](super::record::ObjectRecord) |
//! | `R` object(8) | [`RemoteCopy`](super::record::RemoteCopy) |
//! | `Z` object(8) | [`EncodedCopy`](super::record::EncodedCopy) |
//! | `N` | [`RemoteIdentity`](super::record::RemoteIdentity) |
//! | `P` | [`RemotePlace`](super::record::RemotePlace) |
//! | `M` | [`OnlyRemote`](super::record::OnlyRemote) |
//! | `B` | `u128`: the store whose names a new store took over |
//! | `A` | [`Publications`](super::record::Publications) |
//! | `W` | [`WritesLeft`](super::record::WritesLeft) |
//! | `V` store(16) | `u64`: the highest number that a manifest of its names was seen to have, in a sealed remote |
//! | `S` store(16) | the same, in a remote that is not sealed |
//! | `U` inode(8) | empty: the inode is unsettled, recovery looks at it |
//! | `D` checksum(16) | `InodeId`: a page with this checksum, if it still has it |
//! | `H` model(8) hash(32) sequence(8) | `u32`: the page that ends the prefix there |
//! | `L` model(8) hash(32) tokens sequence(8) | `u32`: the page that continues the prefix there |
//! | `Q` sequence(8) page(4) | [`IndexedPage`](super::record::IndexedPage) |
//! | `Q` sequence(8) | [`IndexedTokens`](super::record::IndexedTokens) |
//! | `T` | [`Totals`](super::record::Totals) |
//! | `K` | [`Time`](super::record::Time): the wall clock at the last commit at which it was believed |
//! | `Y` | [`EventHeads`](super::event::EventHeads) |
//! | `Y` ring(1) slot(4) | [`Event`](super::event::Event) |
//! | `C` | `(u32, bool)`: the epoch of the last mount, and whether it ended in good order |
//!
//! Entries are ordered by a hash of the name, so that a directory can be listed from any offset
//! without the daemon remembering anything about the reader. Two names of one directory share a
//! hash with probability 2^-62 per pair: about 10^-7 in a directory of a million. Both can be
//! looked up even then; a listing that breaks exactly between them repeats neither and may skip one.

use super::event::Ring;
use super::record::{InodeId, ObjectId, Single};

/// First offset that belongs to a name; smaller ones are `.` and `..`.
pub const FIRST_NAME_OFFSET: u64 = 3;

/// Key of an inode.
pub fn inode(inode: InodeId) -> Vec<u8> {
    numbered(b'I', inode.0)
}

/// Key of an object.
pub fn object(object: ObjectId) -> Vec<u8> {
    numbered(b'O', object.0)
}

/// Key of the mark that an inode is unsettled.
pub fn unsettled(inode: InodeId) -> Vec<u8> {
    numbered(b'U', inode.0)
}

/// Key of an object's copy in the remote.
pub fn remote_copy(object: ObjectId) -> Vec<u8> {
    numbered(b'R', object.0)
}

/// Key of an object's encoded copy on the disk.
pub(crate) fn encoded_copy(object: ObjectId) -> Vec<u8> {
    numbered(b'Z', object.0)
}

/// Key of a record of which there is one.
pub(crate) fn single<T: Single>() -> Vec<u8> {
    vec![T::TAG]
}

/// Key of how much only the remote has.
pub(crate) fn only_remote() -> Vec<u8> {
    vec![b'M']
}

/// Key of the store whose names were taken over.
pub fn rebuilt_from() -> Vec<u8> {
    vec![b'B']
}

/// What was seen of manifests in a sealed remote, or in another one.
pub(crate) fn manifests_seen(sealed: bool) -> &'static [u8] {
    if sealed { b"V" } else { b"S" }
}

/// Key of what was seen of a store's manifests there.
pub(crate) fn manifest_seen(store: u128, sealed: bool) -> Vec<u8> {
    [manifests_seen(sealed), &store.to_be_bytes()].concat()
}

/// The store in such a key.
pub(crate) fn store_seen(key: &[u8]) -> Option<u128> {
    let (tag, store) = key.split_first_chunk::<1>()?;
    [true, false].map(manifests_seen).contains(&&tag[..]).then_some(())?;
    Some(u128::from_be_bytes(store.try_into().ok()?))
}

/// Key of a page by its checksum.
pub(crate) fn checksum(checksum: &[u8; 16]) -> Vec<u8> {
    [b"D".as_slice(), checksum].concat()
}

/// What the keys of all sequences of a model start with that have a prefix.
pub fn holders(model: InodeId, prefix: &[u8; 32]) -> Vec<u8> {
    let mut key = numbered(b'H', model.0);
    key.extend_from_slice(prefix);
    key
}

/// What the keys of all pages of a model start with that continue a prefix with these tokens.
pub(crate) fn continuations(model: InodeId, prefix: &[u8; 32], tokens: &[u8]) -> Vec<u8> {
    let mut key = numbered(b'L', model.0);
    key.extend_from_slice(prefix);
    key.extend_from_slice(tokens);
    key
}

/// The key of one of them: that of a sequence.
pub fn of_sequence(mut key: Vec<u8>, sequence: InodeId) -> Vec<u8> {
    key.extend_from_slice(&sequence.0.to_be_bytes());
    key
}

/// The sequence in a key that [`of_sequence`] made.
pub(crate) fn sequence(key: &[u8]) -> Option<InodeId> {
    Some(InodeId(u64::from_be_bytes(*key.last_chunk()?)))
}

/// Model, prefix and sequence of a key that says who has a prefix.
pub fn split_holder(key: &[u8]) -> Option<(InodeId, [u8; 32], InodeId)> {
    let rest = key.strip_prefix(b"H")?;
    let (model, rest) = rest.split_first_chunk()?;
    let (hash, rest) = rest.split_first_chunk()?;
    let sequence = u64::from_be_bytes(rest.try_into().ok()?);
    Some((InodeId(u64::from_be_bytes(*model)), *hash, InodeId(sequence)))
}

/// Key of how far a sequence's tokens are indexed; those of its pages follow.
pub(crate) fn indexed(sequence: InodeId) -> Vec<u8> {
    numbered(b'Q', sequence.0)
}

/// Key of an indexed page.
pub(crate) fn indexed_page(sequence: InodeId, page: u32) -> Vec<u8> {
    let mut key = indexed(sequence);
    key.extend_from_slice(&page.to_be_bytes());
    key
}

/// Key of the clock.
pub(crate) fn clock() -> Vec<u8> {
    vec![b'K']
}

/// Key of what there is of events.
pub(crate) fn event_heads() -> Vec<u8> {
    vec![b'Y']
}

/// Key of a slot of a ring of events.
pub(crate) fn event(ring: Ring, slot: u64) -> Vec<u8> {
    let slot = u32::try_from(slot).expect("no ring has so many slots");
    [b"Y".as_slice(), &[ring as u8], &slot.to_be_bytes()].concat()
}

/// Key of the epoch.
pub fn epoch() -> Vec<u8> {
    vec![b'C']
}

/// Key of the totals.
pub fn totals() -> Vec<u8> {
    vec![b'T']
}

/// Key of a name in a directory.
pub fn entry(parent: InodeId, name: &[u8]) -> Vec<u8> {
    let mut key = numbered(b'E', parent.0);
    key.extend_from_slice(&name_offset(name).to_be_bytes());
    key.extend_from_slice(name);
    key
}

/// Where the entries of a directory start whose offset is at least `offset`.
pub(crate) fn entries_from(parent: InodeId, offset: u64) -> Vec<u8> {
    let mut key = numbered(b'E', parent.0);
    key.extend_from_slice(&offset.to_be_bytes());
    key
}

/// What all entries of a directory start with.
pub(crate) fn entries(parent: InodeId) -> Vec<u8> {
    numbered(b'E', parent.0)
}

/// Offset and name of an entry's key.
pub fn split_entry(key: &[u8]) -> Option<(u64, &[u8])> {
    let offset = key.get(9..17)?.try_into().ok()?;
    Some((u64::from_be_bytes(offset), key.get(17..)?))
}

/// Key of an extended attribute.
pub(crate) fn attribute(inode: InodeId, name: &[u8]) -> Vec<u8> {
    let mut key = numbered(b'X', inode.0);
    key.extend_from_slice(name);
    key
}

/// What all extended attributes of an inode start with; the name follows.
pub(crate) fn attributes(inode: InodeId) -> Vec<u8> {
    numbered(b'X', inode.0)
}

/// The first key of a table, which is also what all its keys start with.
pub fn table(tag: u8) -> Vec<u8> {
    vec![tag]
}

/// The number in a key that `numbered` made.
pub fn number(key: &[u8]) -> Option<u64> {
    Some(u64::from_be_bytes(key.get(1..9)?.try_into().ok()?))
}

/// Offset of a name in a listing: positive as `off_t`, and not that of `.` or `..`.
fn name_offset(name: &[u8]) -> u64 {
    (twox_hash::XxHash3_64::oneshot(name) >> 2).max(FIRST_NAME_OFFSET)
}

fn numbered(tag: u8, number: u64) -> Vec<u8> {
    let mut key = Vec::with_capacity(48);
    key.push(tag);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_key_gives_back_its_name_and_lies_in_its_directory() {
        let key = entry(InodeId(9), b"name");
        let (offset, name) = split_entry(&key).unwrap();
        assert_eq!(name, b"name");
        assert!(key.starts_with(&entries(InodeId(9))));
        assert!(entries_from(InodeId(9), offset) <= key);
        assert!(entries_from(InodeId(9), offset + 1) > key);
        assert!(i64::try_from(offset).is_ok());
    }

    #[test]
    fn keys_are_those_that_stores_have() {
        let number = 0x0102_0304_0506_0708_u64;
        let digits = [1, 2, 3, 4, 5, 6, 7, 8];
        let with = |tag: u8, rest: &[u8]| [&[tag][..], &digits, rest].concat();
        let (inode_id, object_id) = (InodeId(number), ObjectId(number));
        let hash = [9; 32];
        for (found, expected) in [
            (inode(inode_id), with(b'I', b"")),
            (object(object_id), with(b'O', b"")),
            (unsettled(inode_id), with(b'U', b"")),
            (remote_copy(object_id), with(b'R', b"")),
            (encoded_copy(object_id), with(b'Z', b"")),
            (single::<super::super::record::RemoteIdentity>(), b"N".to_vec()),
            (single::<super::super::record::RemotePlace>(), b"P".to_vec()),
            (single::<super::super::record::Publications>(), b"A".to_vec()),
            (single::<super::super::record::WritesLeft>(), b"W".to_vec()),
            (only_remote(), b"M".to_vec()),
            (rebuilt_from(), b"B".to_vec()),
            (clock(), b"K".to_vec()),
            (event_heads(), b"Y".to_vec()),
            (epoch(), b"C".to_vec()),
            (totals(), b"T".to_vec()),
            (table(b'I'), b"I".to_vec()),
            (manifest_seen(5, true), [&b"V"[..], &5_u128.to_be_bytes()].concat()),
            (manifest_seen(5, false), [&b"S"[..], &5_u128.to_be_bytes()].concat()),
            (checksum(&[7; 16]), [&b"D"[..], &[7; 16]].concat()),
            (holders(inode_id, &hash), with(b'H', &hash)),
            (
                continuations(inode_id, &hash, b"tokens"),
                with(b'L', &[&hash[..], b"tokens"].concat()),
            ),
            (of_sequence(b"key".to_vec(), inode_id), [&b"key"[..], &digits].concat()),
            (indexed(inode_id), with(b'Q', b"")),
            (indexed_page(inode_id, 3), with(b'Q', &[0, 0, 0, 3])),
            (event(Ring::Moves, 258), b"Y\x02\0\0\x01\x02".to_vec()),
            (entries(inode_id), with(b'E', b"")),
            (entries_from(inode_id, 3), with(b'E', &[0, 0, 0, 0, 0, 0, 0, 3])),
            (attribute(inode_id, b"user.x"), with(b'X', b"user.x")),
            (attributes(inode_id), with(b'X', b"")),
        ] {
            assert_eq!(found, expected);
        }
        let hashed = (twox_hash::XxHash3_64::oneshot(b"name") >> 2).to_be_bytes();
        assert_eq!(entry(inode_id, b"name"), with(b'E', &[&hashed[..], b"name"].concat()));
    }

    #[test]
    fn what_is_in_a_key_comes_out_again_and_nothing_else_does() {
        let (model, own) = (InodeId(7), InodeId(8));
        let holder = of_sequence(holders(model, &[9; 32]), own);
        assert_eq!(split_holder(&holder), Some((model, [9; 32], own)));
        assert_eq!(split_holder(&holder[1..]), None);
        assert_eq!(split_holder(&holder[..holder.len() - 1]), None);
        assert_eq!(split_holder(&of_sequence(holder.clone(), own)), None);
        assert_eq!((sequence(&holder), sequence(b"short")), (Some(own), None));
        let seen = |sealed| store_seen(&manifest_seen(5, sealed));
        assert_eq!((seen(true), seen(false)), (Some(5), Some(5)));
        assert_eq!((store_seen(b"V1234"), store_seen(&totals())), (None, None));
        assert_eq!((number(&inode(own)), number(b"I1234567")), (Some(8), None));
        assert_eq!(split_entry(&inode(own)), None);
    }
}
