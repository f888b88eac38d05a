//! Bytes that say what they are: whoever reads them knows whether they are whole.

use crate::common::fill;

/// Magic, file, version, length: four u64.
const HEAD: usize = 32;
const MAGIC: u64 = 0x6b76_6673_736f_616b;

/// The bytes of a version of a file: as long as the version says.
pub(crate) fn make(file: u64, version: u64) -> Vec<u8> {
    let length = HEAD + usize::try_from(seed(file, version) % 1_600_000).unwrap();
    let mut bytes = Vec::with_capacity(length);
    for number in [MAGIC, file, version, length as u64] {
        bytes.extend(number.to_le_bytes());
    }
    // Half of it compresses, so that it is encoded when it goes cold.
    bytes.extend(fill(seed(file, version), (length - HEAD) / 2));
    bytes.resize(length, 7);
    bytes
}

/// Which version of a file these bytes are; `None` if they are not one.
pub(crate) fn version(file: u64, bytes: &[u8]) -> Option<u64> {
    let number = |at: usize| {
        let chunk = bytes.get(at..)?.first_chunk()?;
        Some(u64::from_le_bytes(*chunk))
    };
    let version = number(16)?;
    (number(0)? == MAGIC && number(8)? == file && bytes == make(file, version)).then_some(version)
}

fn seed(file: u64, version: u64) -> u64 {
    let bytes = fill(file << 32 | version, 8);
    u64::from_le_bytes(bytes.try_into().unwrap())
}
