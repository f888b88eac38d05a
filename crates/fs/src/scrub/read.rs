//! Reading a file past the page cache.

use std::io;

use memmap2::{Advice, MmapMut};

use kvfs_page::{ContentHasher, PageHasher, PageIdentity};
use kvfs_storage::store::disk::{DIRECT_ALIGNMENT, DiskFile};
use kvfs_storage::store::record::Role;
use kvfs_storage::tier::remote::throttle::Bucket;

/// Bytes per read, on huge pages: into small ones, direct reading is three times as slow.
const READ_BYTES: usize = 4 << 20;

/// A thread's memory, and how fast it may read.
pub(super) struct Reader<'a> {
    memory: MmapMut,
    bucket: Option<&'a Bucket>,
    is_stopped: &'a (dyn Fn() -> bool + Sync),
    count: u64,
}

impl<'a> Reader<'a> {
    pub(super) fn new(
        bucket: Option<&'a Bucket>, is_stopped: &'a (dyn Fn() -> bool + Sync),
    ) -> io::Result<Reader<'a>> {
        let memory = MmapMut::map_anon(READ_BYTES)?;
        // A kernel without huge pages refuses; then the memory has small ones.
        let _ = memory.advise(Advice::HugePage);
        Ok(Reader { memory, bucket, is_stopped, count: 0 })
    }

    /// Bytes read since the last call.
    pub(super) fn take_count(&mut self) -> u64 {
        std::mem::take(&mut self.count)
    }

    /// Notes bytes that somebody else has read, and waits as long as the rate demands.
    pub(super) fn pay(&mut self, bytes: u64) {
        self.count += bytes;
        if let Some(bucket) = self.bucket {
            bucket.pay_unless(bytes, self.is_stopped);
        }
    }

    /// The checksum of a file's bytes. Ended early, it is of some of them.
    pub(super) fn checksum(&mut self, file: &dyn DiskFile, role: Role) -> io::Result<[u8; 16]> {
        let mut hasher = Hasher::new(role);
        let is_direct = file.bypass_cache();
        // In steps that the rate allows a few of each second.
        let step = self.bucket.map_or(READ_BYTES, Bucket::step_bytes).min(READ_BYTES);
        let step = step.next_multiple_of(4096);
        let mut offset = 0;
        while !(self.is_stopped)() {
            let count = file.read_at(&mut self.memory[..step], offset)?;
            hasher.update(&self.memory[..count]);
            offset += count as u64;
            self.pay(count as u64);
            // The end; behind one that is not aligned, direct reading is not defined.
            if count < step || (is_direct && !offset.is_multiple_of(DIRECT_ALIGNMENT)) {
                break;
            }
        }
        Ok(hasher.finish())
    }
}

enum Hasher {
    Page(Box<PageHasher>, PageIdentity),
    File(Box<ContentHasher>),
}

impl Hasher {
    fn new(role: Role) -> Hasher {
        match role {
            Role::Page(page) => Hasher::Page(Box::default(), PageIdentity::from(&page)),
            _ => Hasher::File(Box::default()),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Page(hasher, _) => hasher.update(bytes),
            Hasher::File(hasher) => hasher.update(bytes),
        }
    }

    fn finish(self) -> [u8; 16] {
        match self {
            Hasher::Page(hasher, identity) => hasher.finish(&identity).object.0,
            Hasher::File(hasher) => hasher.finish().0,
        }
    }
}
