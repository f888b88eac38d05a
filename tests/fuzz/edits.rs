//! Changes to an ordered table of records, as bytes tell them.

use std::collections::BTreeMap;

/// Keys and values.
pub(crate) type Table = BTreeMap<Vec<u8>, Vec<u8>>;

/// Each edit is a record (2), what to do (1), where (1), how many bytes follow (1), and these.
pub(crate) fn apply(table: &mut Table, mut edits: &[u8]) {
    while let [low, high, what, at, length, rest @ ..] = edits {
        let (bytes, next) = rest.split_at(rest.len().min(usize::from(*length)));
        edits = next;
        let number = usize::from(u16::from_le_bytes([*low, *high])) % table.len().max(1);
        let Some((key, value)) = table.iter().nth(number) else {
            return;
        };
        let (mut key, mut value) = (key.clone(), value.clone());
        match what % 8 {
            0 => drop(table.remove(&key)),
            1 | 2 => {
                write_at(&mut value, *at, bytes);
                table.insert(key, value);
            }
            3 => {
                value.truncate(usize::from(*at));
                table.insert(key, value);
            }
            // Under another key: the same name elsewhere, the same object for another inode.
            4 => {
                write_at(&mut key, *at, bytes);
                table.insert(key, value);
            }
            5 => {
                table.remove(&key);
                key.truncate(usize::from(*at));
                key.extend_from_slice(bytes);
                table.insert(key, value);
            }
            // The value of another record of the same kind.
            6 => {
                let kind = key.first().copied();
                let same = table.iter().filter(|(key, _)| key.first().copied() == kind);
                if let Some((_, other)) = same.cycle().nth(usize::from(*at)) {
                    table.insert(key, other.clone());
                }
            }
            _ => {
                table.insert(bytes.to_vec(), value);
            }
        }
    }
}

fn write_at(target: &mut Vec<u8>, at: u8, bytes: &[u8]) {
    let at = usize::from(at).min(target.len());
    let end = target.len().min(at + bytes.len());
    target.splice(at..end, bytes.iter().copied());
}

/// Beginnings of keys, names that no file may have, and a length that overflows.
pub(crate) const WORDS: &[&[u8]] =
    &[b"I\0\0\0\0\0\0\0\x01", b"E\0\0\0\0\0\0\0\x03", b"..", b"/", b"\xff\xff\xff\xff\x0f"];

/// Edits that hit each record once, in each way.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let edit = |number: u8, what: u8| vec![number, 0, what, 0, 2, 0xff, 0];
    let each = (0..40).step_by(3).flat_map(|number| (0..8).map(move |what| edit(number, what)));
    // Nothing that is followed: the store as it was.
    each.chain([vec![0]]).collect()
}
