//! One thing that happened to an object, in 16 bytes.

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// A page came to be: memory takes it first, where there is a tier.
    NewPage,
    /// Another file came to be, or changed.
    NewFile,
    /// Somebody asked for it to be brought into memory.
    Promoted,
    /// It came into memory because it was to be read and the disk had it in no form that can be.
    Landed,
    /// It came from the remote.
    Fetched,
    /// It was opened to be read, and was not in memory.
    Used,
    /// It was opened to be read, and was in memory.
    UsedInMemory,
    /// It was opened again so many times, as its record says in the place of tokens, and nothing happened in between.
    UsedAgain,
    /// It was deleted.
    Gone,
}

use Happened::{Fetched, Gone, Landed, NewFile, NewPage, Promoted, Used, UsedAgain, UsedInMemory};

const ALL: [Happened; 9] =
    [NewPage, NewFile, Promoted, Landed, Fetched, Used, UsedInMemory, UsedAgain, Gone];

/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = size_of::<Record>();

/// Bits of a number of bytes that are kept.
const DIGITS: u32 = 26;
/// Bits that say how far they are shifted.
const SHIFT_BITS: u32 = 6;

/// A record as it is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// 48 bits of the object's number, 8 of what happened, 8 of the model.
    head: u64,
    bytes: u32,
    /// Of one layer; of uses in a row, how many.
    pub(super) tokens: u32,
}

const _: () = assert!(RECORD_BYTES == 16);

impl Record {
    pub(super) fn new(object: u64, what: Happened, bytes: u64) -> Record {
        Record { head: object << 16 | (what as u64) << 8, bytes: squeeze(bytes), tokens: 0 }
    }

    /// The same of a page, of a numbered model.
    pub(super) fn of_page(self, model: u8, tokens: u32) -> Record {
        Record { head: self.head | u64::from(model), tokens, ..self }
    }

    /// Whether it says the same of the same object, but for numbers.
    pub(super) fn is_like(self, other: Record) -> bool {
        self.head == other.head
    }

    pub(super) fn object(self) -> u64 {
        self.head >> 16
    }

    /// `None` of a kind that only a newer version knows.
    pub(super) fn what(self) -> Option<Happened> {
        ALL.get(usize::from(self.head.to_le_bytes()[1])).copied()
    }

    /// 0 of what is no page.
    pub(super) fn model(self) -> u8 {
        self.head.to_le_bytes()[0]
    }

    pub(super) fn bytes(self) -> u64 {
        u64::from(self.bytes >> SHIFT_BITS) << (self.bytes & ((1 << SHIFT_BITS) - 1))
    }

    pub(super) fn to_le_bytes(self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..8].copy_from_slice(&self.head.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.bytes.to_le_bytes());
        bytes[12..].copy_from_slice(&self.tokens.to_le_bytes());
        bytes
    }

    pub(super) fn from_le_bytes(record: [u8; RECORD_BYTES]) -> Record {
        let number = u128::from_le_bytes(record);
        let [head, bytes, tokens] = [(0, 64), (64, 32), (96, 32)]
            .map(|(from, bits)| u64::try_from(number >> from & ((1 << bits) - 1)).unwrap_or(0));
        let [bytes, tokens] = [bytes, tokens].map(|part| u32::try_from(part).unwrap_or(0));
        Record { head, bytes, tokens }
    }
}

/// Whether an object is in a sample of one in `2^bits`. The hash is another one than that of the policy, which samples
/// once more.
pub(super) fn is_sampled(object: u64, bits: u32) -> bool {
    bits == 0 || spread(object) >> (u64::BITS - bits) == 0
}

/// Spreads the numbers of objects.
pub(super) fn spread(object: u64) -> u64 {
    let mut bits = object.wrapping_add(0x2545_f491_4f6c_dd1d).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits = (bits ^ (bits >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
    bits ^ (bits >> 32)
}

/// A number of bytes in 32 bits: exact below 64 MiB, else right to eight digits.
fn squeeze(bytes: u64) -> u32 {
    let shift = (u64::BITS - bytes.leading_zeros()).saturating_sub(DIGITS);
    let digits = u32::try_from(bytes >> shift).unwrap_or(u32::MAX >> SHIFT_BITS);
    digits << SHIFT_BITS | shift
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_come_back_as_they_were() {
        for (at, what) in ALL.into_iter().enumerate() {
            let object = (1 << 48) - 1 - at as u64;
            let record = Record::new(object, what, 4096 * at as u64).of_page(255, u32::MAX);
            let read = Record::from_le_bytes(record.to_le_bytes());
            assert_eq!(read, record);
            assert_eq!((read.object(), read.what()), (object, Some(what)));
            assert_eq!((read.bytes(), read.model()), (4096 * at as u64, 255));
        }
    }

    #[test]
    fn lengths_are_kept_well_enough() {
        for bytes in [0, 1, 4096, (1 << 26) - 1, (1 << 26) + 1, 3 << 40, u64::MAX] {
            let kept = Record::new(1, Used, bytes).bytes();
            assert!(kept <= bytes && bytes - kept <= bytes >> (DIGITS - 1), "{bytes}: {kept}");
        }
        assert_eq!(Record::new(1, Used, (1 << 26) - 1).bytes(), (1 << 26) - 1);
    }

    #[test]
    fn samples_are_shares_and_smaller_ones_are_in_larger_ones() {
        for bits in [1, 3, 6] {
            let sampled = (0..100_000).filter(|object| is_sampled(*object, bits));
            let count = sampled.inspect(|object| assert!(is_sampled(*object, bits - 1))).count();
            let expected = 100_000 >> bits;
            assert!(count.abs_diff(expected) < expected / 8, "{count} of {expected}");
        }
    }
}
