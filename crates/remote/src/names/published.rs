//! Which stores have published to a remote, so that somebody can choose among them.

use std::fmt::Write;

use kvfs_page::calendar::date_of;
use serde_json::{Value, json};

use super::{read_root, versions};
use crate::BlobStore;
use crate::error::{RemoteError, Result};
use crate::name::StoreId;

const SECONDS_PER_DAY: u64 = 86_400;

/// A store, as its newest manifest tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishedStore {
    /// Its id, which `--rebuild-from` takes.
    pub id: StoreId,
    /// When it last published, in seconds since 1970 by its machine's clock; unknown if none of its
    /// manifests can be read.
    pub published_seconds: Option<u64>,
    /// Whose it is; unknown if an older kvfs published.
    pub owner: Option<Owner>,
}

/// What a store says about itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owner {
    /// Its machine.
    pub host: String,
    /// Files that it has.
    pub files: u64,
    /// Their bytes.
    pub bytes: u64,
}

/// All stores that have published to a remote.
pub fn stores(store: &dyn BlobStore) -> Result<Vec<PublishedStore>> {
    super::stores(store)?.into_iter().map(|id| newest(store, id)).collect()
}

fn newest(store: &dyn BlobStore, id: StoreId) -> Result<PublishedStore> {
    for sequence in versions(store, id)?.into_iter().rev() {
        let root = match read_root(store, id, sequence) {
            Ok(root) => root,
            // An older one may do; a manifest of another version tells nothing.
            Err(RemoteError::Corrupt(_) | RemoteError::Missing(_) | RemoteError::Foreign(_)) => {
                continue;
            }
            Err(error) => return Err(error),
        };
        let about = root.about;
        let owner = (!about.host.is_empty()).then_some(Owner {
            // Whoever may write to the remote has written it.
            host: about.host.chars().filter(|letter| !letter.is_control()).take(64).collect(),
            files: about.files,
            bytes: about.bytes,
        });
        return Ok(PublishedStore { id, published_seconds: Some(root.published_seconds), owner });
    }
    Ok(PublishedStore { id, published_seconds: None, owner: None })
}

/// The stores in columns, the heads of the columns first.
pub fn table(stores: &[PublishedStore]) -> String {
    let unknown = || "?".to_owned();
    let line = |store: &PublishedStore| {
        let owner = store.owner.as_ref();
        [
            store.id.to_string(),
            owner.map_or_else(unknown, |owner| owner.host.clone()),
            store.published_seconds.map_or_else(unknown, utc),
            owner.map_or_else(unknown, |owner| owner.files.to_string()),
            owner.map_or_else(unknown, |owner| owner.bytes.to_string()),
        ]
    };
    let heads = ["STORE", "HOST", "PUBLISHED", "FILES", "BYTES"].map(str::to_owned);
    let lines: Vec<[String; 5]> = [heads].into_iter().chain(stores.iter().map(line)).collect();
    let width = |column: usize| lines.iter().map(|line| line[column].len()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(width).collect();
    let mut text = String::new();
    for line in &lines {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        // Writing to a String cannot fail.
        let _ = writeln!(text, "{}", cells.collect::<Vec<_>>().join("  ").trim_end());
    }
    text
}

/// The stores for programs.
pub fn to_json(stores: &[PublishedStore]) -> Value {
    let line = |store: &PublishedStore| {
        json!({
            "store": store.id.to_string(),
            "published_seconds": store.published_seconds,
            "host": store.owner.as_ref().map(|owner| &owner.host),
            "files": store.owner.as_ref().map(|owner| owner.files),
            "bytes": store.owner.as_ref().map(|owner| owner.bytes),
        })
    };
    json!({ "stores": stores.iter().map(line).collect::<Vec<_>>() })
}

/// A time of day without a zone's rules: `2026-11-22 09:30 UTC`.
fn utc(seconds: u64) -> String {
    let (days, seconds) = (seconds / SECONDS_PER_DAY, seconds % SECONDS_PER_DAY);
    let (year, month, day) = date_of(days.cast_signed());
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", seconds / 3600, seconds / 60 % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_those_of_the_calendar() {
        fn check(seconds: u64, expected: &str) {
            assert_eq!(utc(seconds), expected);
        }
        check(0, "1970-01-01 00:00 UTC");
        check(951_782_399, "2000-02-28 23:59 UTC");
        check(951_782_400, "2000-02-29 00:00 UTC");
        check(1_700_000_000, "2023-11-14 22:13 UTC");
        check(1_735_689_599, "2024-12-31 23:59 UTC");
    }

    #[test]
    fn a_table_has_a_line_for_each_store() {
        let owner = Some(Owner { host: "gpu-7".to_owned(), files: 3, bytes: 4096 });
        let stores = [
            PublishedStore { id: StoreId(7), published_seconds: Some(0), owner },
            PublishedStore { id: StoreId(8), published_seconds: None, owner: None },
        ];
        let expected = "\
            STORE                             HOST   PUBLISHED             FILES  BYTES\n\
            00000000000000000000000000000007  gpu-7  1970-01-01 00:00 UTC  3      4096\n\
            00000000000000000000000000000008  ?      ?                     ?      ?\n";
        assert_eq!(table(&stores), expected);
    }
}
