//! What the writers know of each file: the newest version that they tried to write, and the oldest that
//! may be seen, since a sync after it was answered.

use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use kvfs::page::{TokenStart, names};

use crate::common::{Model, Mount};
use crate::content;

pub(crate) const FILES: usize = 36;
pub(crate) const PAGES: usize = 24;
/// Tokens of a page of [`Model::small`].
const PAGE_TOKENS: u64 = 32;

/// Version 0 is no file.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Known {
    pub(crate) acknowledged: u64,
    pub(crate) newest: u64,
}

/// A file, or a page: both are replaced by a rename.
pub(crate) struct Slot {
    pub(crate) path: PathBuf,
    number: u64,
    page: Option<(u32, u64)>,
    pub(crate) known: Mutex<Known>,
}

pub(crate) struct Ledger {
    pub(crate) slots: Vec<Slot>,
    model: Model,
}

impl Ledger {
    pub(crate) fn new(mount: &Mount, model: &Model) -> Ledger {
        for number in 0..4 {
            std::fs::create_dir(mount.files(format!("d{number}"))).unwrap();
        }
        let files =
            (0..FILES).map(|number| (mount.files(format!("d{}/f{number}", number % 4)), None));
        let pages = (0..PAGES as u64).map(|number| {
            let layer = u32::from(number % 2 == 1);
            let start = number / 4 * PAGE_TOKENS;
            let sequence = ["one", "two"][usize::from(number % 4 > 1)];
            let directory = model.layer(mount, sequence, layer);
            (directory.join(names::format_page(TokenStart(start))), Some((layer, start)))
        });
        let slots = (0..).zip(files.chain(pages)).map(|(number, (path, page))| Slot {
            path,
            number,
            page,
            known: Mutex::default(),
        });
        let slots = slots.collect();
        crate::common::sys::sync_directory(mount.path()).unwrap();
        Ledger { slots, model: model.clone() }
    }

    /// The bytes of a version.
    pub(crate) fn bytes(&self, slot: &Slot, version: u64) -> Vec<u8> {
        match slot.page {
            Some((layer, start)) => self.model.page(layer, start, slot.number << 32 | version),
            None => content::make(slot.number, version),
        }
    }

    /// The version that these bytes are; panics if they are none of those that may be seen.
    pub(crate) fn check(&self, slot: &Slot, bytes: &[u8], oldest: u64) {
        let newest = slot.known.lock().unwrap().newest;
        let version = if slot.page.is_some() {
            let mut newest_first = (oldest.max(1)..=newest).rev();
            newest_first.find(|version| self.bytes(slot, *version) == bytes)
        } else {
            content::version(slot.number, bytes)
        };
        let path = slot.path.display();
        let length = bytes.len();
        let version = version.unwrap_or_else(|| panic!("{path}: {length} bytes that nobody wrote"));
        assert!((oldest..=newest).contains(&version), "{path}: {version}, not {oldest}..={newest}");
    }

    /// While nobody writes: every file is a version that may be there.
    #[track_caller]
    pub(crate) fn compare_all(&self) {
        for slot in &self.slots {
            let oldest = slot.known.lock().unwrap().acknowledged;
            match std::fs::read(&slot.path) {
                Ok(bytes) => self.check(slot, &bytes, oldest),
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {
                    assert_eq!(oldest, 0, "{} is lost", slot.path.display());
                }
                Err(error) => panic!("{}: {error}", slot.path.display()),
            }
        }
    }

    /// Removes all files, durably.
    pub(crate) fn remove_all(&self) {
        for slot in &self.slots {
            let _ = std::fs::remove_file(&slot.path);
            for writer in 0..crate::WRITERS {
                let _ = std::fs::remove_file(Ledger::temporary(slot, writer));
            }
        }
        crate::common::sys::sync_directory(self.slots[0].path.parent().unwrap()).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }

    /// A staging name beside a file, of one writer alone.
    pub(crate) fn temporary(slot: &Slot, writer: usize) -> PathBuf {
        slot.path.with_file_name(format!(".w{writer}.tmp"))
    }
}
