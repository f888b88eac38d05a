//! A record of a pack: a header of 64 bytes with checksums, and what it is about behind it.
//!
//! | Bytes | Meaning |
//! |---|---|
//! | 0..4 | `kvpr` |
//! | 4 | kind: 1 bytes of an object, 2 note, 3 gone, 4 index, 5 end |
//! | 5..8 | zero |
//! | 8..16 | object |
//! | 16..24 | length of the payload in bytes; of an end, where the index begins |
//! | 24..32, 32..36 | modification time: seconds, nanoseconds |
//! | 36..40 | zero |
//! | 40..56 | XXH3-128 of the payload; of a gone record, pack and offset of the record that is not valid any more |
//! | 56..64 | XXH3-64 of bytes 0..56, of the pack's number and of the offset |
//!
//! Numbers are little-endian. The last checksum covers the place, so that nothing that a disk left there from
//! earlier is taken for a record. Records begin at multiples of 64.

use twox_hash::{XxHash3_64, XxHash3_128};

use crate::store::record::{ObjectId, Time};

/// Bytes of a header, and what records are aligned to.
pub(super) const HEADER_BYTES: u64 = 64;
const HEADER_LENGTH: usize = 64;
const MAGIC: &[u8; 4] = b"kvpr";
/// Where the last checksum is.
const SUM_AT: usize = 56;

pub(super) type RawHeader = [u8; HEADER_LENGTH];

/// Where a record is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Place {
    /// Number of the pack.
    pub(super) pack: u32,
    /// Offset of its header in bytes.
    pub(super) offset: u32,
}

/// What a record is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The bytes of an object.
    Bytes,
    /// What is noted of an object.
    Note,
    /// The record of an object's bytes at that place is not valid any more.
    Gone(Place),
    /// The headers of all records of the pack, each with its offset.
    Index,
    /// The last header of a pack that is complete; the index begins at this offset.
    End(u64),
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: Kind,
    pub(super) object: ObjectId,
    /// Bytes of the payload.
    pub(super) length: u64,
    pub(super) mtime: Time,
    /// XXH3-128 of the payload.
    pub(super) checksum: u128,
}

impl Header {
    /// Of a payload.
    pub(super) fn of(kind: Kind, object: ObjectId, mtime: Time, payload: &[u8]) -> Header {
        let checksum = XxHash3_128::oneshot(payload);
        Header { kind, object, length: payload.len() as u64, mtime, checksum }
    }

    /// Bytes of the record, with what follows the payload up to the next one.
    pub(super) fn record_bytes(&self) -> u64 {
        record_bytes(self.length)
    }

    pub(super) fn is_of(&self, payload: &[u8]) -> bool {
        self.length == payload.len() as u64 && self.checksum == XxHash3_128::oneshot(payload)
    }

    pub(super) fn encode(&self, at: Place) -> RawHeader {
        let mut raw = [0; HEADER_LENGTH];
        raw[..4].copy_from_slice(MAGIC);
        let (kind, length, sum) = match self.kind {
            Kind::Bytes => (1, self.length, self.checksum),
            Kind::Note => (2, self.length, self.checksum),
            Kind::Gone(place) => {
                (3, 0, u128::from(place.pack) | u128::from(place.offset) << u32::BITS)
            }
            Kind::Index => (4, self.length, self.checksum),
            Kind::End(offset) => (5, offset, 0),
        };
        raw[4] = kind;
        raw[8..16].copy_from_slice(&self.object.0.to_le_bytes());
        raw[16..24].copy_from_slice(&length.to_le_bytes());
        raw[24..32].copy_from_slice(&self.mtime.seconds.to_le_bytes());
        raw[32..36].copy_from_slice(&self.mtime.nanoseconds.to_le_bytes());
        raw[40..SUM_AT].copy_from_slice(&sum.to_le_bytes());
        let own = own_checksum(&raw, at);
        raw[SUM_AT..].copy_from_slice(&own.to_le_bytes());
        raw
    }

    /// What tells it from all others, at any place.
    pub(super) fn own_checksum(&self, at: Place) -> u64 {
        own_checksum(&self.encode(at), at)
    }

    /// The header at a place, if there is one.
    pub(super) fn decode(raw: &RawHeader, at: Place) -> Option<Header> {
        let number = |range: std::ops::Range<usize>| {
            raw[range].iter().rev().fold(0, |sum: u128, byte| sum << 8 | u128::from(*byte))
        };
        let long = |range| u64::try_from(number(range)).unwrap_or_default();
        let short = |range| u32::try_from(number(range)).unwrap_or_default();
        if &raw[..4] != MAGIC || long(SUM_AT..HEADER_LENGTH) != own_checksum(raw, at) {
            return None;
        }
        let (length, checksum) = (long(16..24), number(40..SUM_AT));
        let (kind, length, checksum) = match raw[4] {
            1 => (Kind::Bytes, length, checksum),
            2 => (Kind::Note, length, checksum),
            3 => (Kind::Gone(Place { pack: short(40..44), offset: short(44..48) }), 0, 0),
            4 => (Kind::Index, length, checksum),
            5 => (Kind::End(length), 0, 0),
            _ => return None,
        };
        let seconds = long(24..32).cast_signed();
        let mtime = Time { seconds, nanoseconds: short(32..36) };
        Some(Header { kind, object: ObjectId(long(8..16)), length, mtime, checksum })
    }
}

/// Bytes of a record with a payload of that length.
pub(super) fn record_bytes(length: u64) -> u64 {
    HEADER_BYTES + length.next_multiple_of(HEADER_BYTES)
}

fn own_checksum(raw: &RawHeader, at: Place) -> u64 {
    let mut covered = [0; HEADER_LENGTH];
    covered[..SUM_AT].copy_from_slice(&raw[..SUM_AT]);
    covered[SUM_AT..SUM_AT + 4].copy_from_slice(&at.pack.to_le_bytes());
    covered[SUM_AT + 4..].copy_from_slice(&at.offset.to_le_bytes());
    XxHash3_64::oneshot(&covered)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_is_one_at_its_place_only_and_whatever_bit_changes_is_noticed() {
        let at = Place { pack: 3, offset: 640 };
        let mtime = Time { seconds: -7, nanoseconds: 999_999_999 };
        let kinds = [Kind::Bytes, Kind::Note, Kind::Index];
        let mut headers: Vec<Header> =
            kinds.map(|kind| Header::of(kind, ObjectId(77), mtime, b"payload")).to_vec();
        for kind in [Kind::Gone(Place { pack: u32::MAX, offset: 64 }), Kind::End(1 << 31)] {
            headers.push(Header { kind, object: ObjectId(8), length: 0, mtime, checksum: 0 });
        }
        for header in headers {
            let raw = header.encode(at);
            assert_eq!(Header::decode(&raw, at), Some(header));
            assert_eq!(Header::decode(&raw, Place { offset: 704, ..at }), None);
            assert_eq!(Header::decode(&raw, Place { pack: 4, ..at }), None);
            for bit in 0..HEADER_LENGTH * 8 {
                let mut changed = raw;
                changed[bit / 8] ^= 1 << (bit % 8);
                assert_eq!(Header::decode(&changed, at), None, "bit {bit}");
            }
        }
        let header = Header::of(Kind::Bytes, ObjectId(1), mtime, b"payload");
        assert!(header.is_of(b"payload") && !header.is_of(b"paYload") && !header.is_of(b"payloa"));
        assert_eq!([0, 1, 64, 65].map(record_bytes), [64, 128, 128, 192]);
    }
}
