//! Cuts an ordered table into chunks at places that depend on the keys nearby and on nothing else:
//! a row that comes or goes changes one chunk and leaves the borders of all others.

use twox_hash::XxHash3_64;

use super::Row;
use super::format::CHUNK_BYTES_MAX;
use crate::error::{RemoteError, Result};

/// A row begins a chunk if the hash of its key has these bits zero: one in 2048. A chunk of that
/// many names is some 100 KB, so a change of one name sends that, and the manifest of ten million
/// names lists 5000 chunks.
const BORDER_MASK: u64 = 2048 - 1;
/// Bytes that a row takes beside key and value, at most: lengths and the name of an object.
const ROW_BYTES_EXTRA: usize = 64;

fn is_border(key: &[u8]) -> bool {
    XxHash3_64::oneshot(key) & BORDER_MASK == 0
}

/// The rows in chunks, none of them empty or larger than [`CHUNK_BYTES_MAX`].
pub(super) fn cut(
    rows: impl Iterator<Item = Result<Row>>,
) -> impl Iterator<Item = Result<Vec<Row>>> {
    let mut rows = rows.peekable();
    std::iter::from_fn(move || {
        let mut part: Vec<Row> = Vec::new();
        let mut bytes = 0;
        loop {
            match rows.peek() {
                None => break,
                Some(Err(_)) => return rows.next().map(|row| row.map(|_| Vec::new())),
                Some(Ok(row)) => {
                    let is_new = !part.is_empty();
                    let row_bytes = row.key.len() + row.value.len() + ROW_BYTES_EXTRA;
                    if row_bytes > CHUNK_BYTES_MAX {
                        let message = format!("a record of {row_bytes} bytes cannot be published");
                        return Some(Err(RemoteError::Other(message)));
                    }
                    if is_new && (is_border(&row.key) || bytes + row_bytes > CHUNK_BYTES_MAX) {
                        break;
                    }
                    bytes += row_bytes;
                }
            }
            if let Some(Ok(row)) = rows.next() {
                part.push(row);
            }
        }
        (!part.is_empty()).then_some(Ok(part))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(numbers: impl Iterator<Item = u64>, value_bytes: usize) -> Vec<Row> {
        let row = |number: u64| Row {
            key: number.to_be_bytes().to_vec(),
            value: vec![7; value_bytes],
            blob: None,
        };
        numbers.map(row).collect()
    }

    fn parts(table: &[Row]) -> Vec<Vec<Row>> {
        cut(table.iter().cloned().map(Ok)).map(Result::unwrap).collect()
    }

    #[test]
    fn the_parts_are_the_table_and_of_the_size_wanted() {
        let table = table(0..100_000, 20);
        let parts = parts(&table);
        assert_eq!(parts.concat(), table);
        assert!((30..80).contains(&parts.len()), "{} parts", parts.len());
    }

    #[test]
    fn a_change_leaves_the_other_parts_alone() {
        let before = parts(&table(0..100_000, 20));
        let after = parts(&table((0..100_000).filter(|number| *number != 50_000), 20));
        let changed = after.iter().filter(|part| !before.contains(part)).count();
        assert!(changed <= 2, "{changed} of {} parts changed", after.len());
    }

    #[test]
    fn large_rows_make_small_parts_and_a_row_too_large_is_refused() {
        let parts = parts(&table(0..100, CHUNK_BYTES_MAX / 10));
        assert!(parts.len() >= 10 && parts.iter().all(|part| part.len() < 10));
        let huge = table(0..1, CHUNK_BYTES_MAX);
        assert!(cut(huge.into_iter().map(Ok)).next().unwrap().is_err());
        assert!(cut(std::iter::empty()).next().is_none());
    }
}
