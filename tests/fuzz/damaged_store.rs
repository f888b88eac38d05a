//! A store whose `meta.redb` is sound as a database, with forged records in it: it can be refused, or
//! be mounted and used, or checked and repaired, but nothing panics, and nothing goes round in circles.

use std::path::Path;

use kvfs::store::Store;
use kvfs::store::fsck::{self, FsckOptions};

use super::edits::{self, Table};
use super::engine::{Outcome, Target, directory_in_memory};
use super::tree;

const DIGEST: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("digest");
const RECORDS: redb::TableDefinition<'_, &[u8], &[u8]> = redb::TableDefinition::new("records");

pub(crate) fn target() -> Target {
    let original = directory_in_memory();
    let fs = tree::open(original.path()).unwrap();
    tree::populate(&fs);
    tree::settle(&fs).unwrap();
    drop(fs);
    let table = read_table(&original.path().join("meta.redb"));
    Target {
        name: "damaged_store",
        length_max: 300,
        seeds: edits::seeds(),
        words: edits::WORDS,
        allocation_max: 32 << 20,
        run: Box::new(move |input| {
            let mut table = table.clone();
            edits::apply(&mut table, input);
            let directory = directory_in_memory();
            copy(original.path(), directory.path());
            write_table(&directory.path().join("meta.redb"), &table);
            run(directory.path())
        }),
    }
}

fn run(directory: &Path) -> Outcome {
    let before = check(directory, false);
    let outcome = match tree::open(directory) {
        Err(error) => Outcome::refused(&error),
        Ok(fs) => {
            let visits = tree::touch_everything(&fs);
            let settled = tree::settle(&fs).is_ok();
            Outcome::accepted((visits.min(40), settled, before))
        }
    };
    check(directory, true);
    check(directory, false);
    outcome
}

/// How much fsck finds, roughly.
fn check(directory: &Path, repair: bool) -> Option<usize> {
    let store = Store::open(directory).ok()?;
    let options = FsckOptions { repair, ..FsckOptions::default() };
    let report = fsck::run(&store, &options, &|_, _| {}).ok()?;
    Some(report.findings.len().min(4))
}

pub(crate) fn read_table(path: &Path) -> Table {
    use redb::{ReadableDatabase, ReadableTable};
    let database = redb::Database::open(path).unwrap();
    let table = database.begin_read().unwrap().open_table(RECORDS).unwrap();
    let records = table.iter().unwrap().map(|record| {
        let (key, value) = record.unwrap();
        (key.value().to_vec(), value.value().to_vec())
    });
    records.collect()
}

fn write_table(path: &Path, records: &Table) {
    let database = redb::Database::create(path).unwrap();
    let mut transaction = database.begin_write().unwrap();
    transaction.set_durability(redb::Durability::Immediate).unwrap();
    {
        let mut table = transaction.open_table(RECORDS).unwrap();
        table.retain(|key, _| records.contains_key(key)).unwrap();
        for (key, value) in records {
            table.insert(key.as_slice(), value.as_slice()).unwrap();
        }
    }
    // Nothing but what the records add up to would be found.
    transaction.delete_table(DIGEST).unwrap();
    transaction.commit().unwrap();
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            std::fs::create_dir(&target).unwrap();
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).unwrap();
        }
    }
}
