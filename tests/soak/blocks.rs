//! Blocks in a pool that an engine lays out itself, and files that it names by hash: registered, read by
//! somebody else, withdrawn before the bytes change. Copies of descriptors are closed late, pools are
//! replaced by a rename, descriptions are given up, and nothing of that brings a block back.

use std::collections::VecDeque;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvfs::page::block_map::{BlockMap, format_block};
use kvfs::page::{Layer, PrefixHash, names};
use kvfs::reader::{Block, unregister_block};

use crate::common::sys::{close, duplicate, open, rename, sync_directory, write_and_close};
use crate::common::{Model, Mount, fill, forks};
use crate::work::{Worker, count, of_reader, or_absent};

const CELLS: usize = 16;
const LAYERS: usize = 2;
/// Copies of descriptors that are open at a time.
const COPIES_MAX: usize = 4;
/// What no block is made of.
const NOTHING: u64 = 0;

/// The pool, and what lies in it.
pub(crate) struct Blocks {
    model: PathBuf,
    pool: PathBuf,
    by_hash: PathBuf,
    /// Bytes of K and of V of a page.
    sizes: [u64; 2],
    /// What is registered in each cell: a number that says what its bytes are.
    cells: Mutex<[u64; CELLS]>,
}

/// Keeps a description open, after another copy was closed.
enum Copy {
    Own(File),
    Childs(Child),
}

impl Blocks {
    pub(crate) fn new(mount: &Mount, model: &Model) -> Blocks {
        let geometry = model.manifest.geometry();
        let tokens = geometry.page_tokens();
        let blocks = Blocks {
            model: model.directory(mount),
            pool: mount.files("pool"),
            by_hash: mount.files("by-hash"),
            sizes: [geometry.k_bytes(tokens), geometry.v_bytes(tokens)],
            cells: Mutex::new([NOTHING; CELLS]),
        };
        std::fs::create_dir(&blocks.by_hash).unwrap();
        File::create_new(&blocks.pool).unwrap().set_len(blocks.pool_bytes()).unwrap();
        sync_directory(mount.path()).unwrap();
        blocks
    }

    fn cell_bytes(&self) -> u64 {
        LAYERS as u64 * (self.sizes[0] + self.sizes[1])
    }

    fn pool_bytes(&self) -> u64 {
        CELLS as u64 * self.cell_bytes()
    }

    fn bytes(&self, number: u64) -> Vec<u8> {
        fill(number, usize::try_from(self.cell_bytes()).unwrap())
    }

    fn hash(number: u64) -> PrefixHash {
        PrefixHash(fill(!number, 32).try_into().unwrap())
    }

    fn path(&self, number: u64) -> PathBuf {
        self.model.join(names::BLOCKS).join(format_block(&Blocks::hash(number), Layer(0)))
    }

    /// What an engine tells of a cell: one buffer for K and V of each layer.
    fn describe(&self, cell: usize) -> Vec<u8> {
        let begin = cell as u64 * self.cell_bytes();
        let [k, v] = self.sizes;
        let offsets = (0..LAYERS as u64).map(|layer| begin + layer * (k + v));
        let map = BlockMap {
            file: "files/pool".to_owned(),
            layer: 0,
            shape: [u32::try_from(LAYERS).unwrap(), 2, 1],
            sizes: self.sizes,
            offsets: offsets.flat_map(|offset| [offset, offset + k]).collect(),
            inode: None,
            registration: None,
        };
        serde_json::to_vec(&map).unwrap()
    }

    fn find(&self, number: u64) -> io::Result<Option<Block>> {
        of_reader(Block::find(&self.model, &Blocks::hash(number), Layer(0)))
    }

    /// Whether its name is there; [`Block::find`] looks at the file as well.
    fn is_there(&self, number: u64) -> io::Result<bool> {
        or_absent(self.path(number).metadata()).map(|found| found.is_some())
    }

    #[track_caller]
    fn expect_absent(&self, number: u64) -> io::Result<()> {
        assert!(!self.is_there(number)?, "block {number} is there, and was withdrawn");
        Ok(())
    }

    /// After a kill: no block is there, since nobody knows which of the bytes are.
    #[track_caller]
    pub(crate) fn forget_all(&self) {
        for number in std::mem::replace(&mut *self.cells.lock().unwrap(), [NOTHING; CELLS]) {
            self.expect_absent(number).unwrap();
        }
    }

    /// Withdraws all blocks, and removes what they lie in.
    pub(crate) fn remove_all(&self) {
        for number in *self.cells.lock().unwrap() {
            let was_there =
                of_reader(unregister_block(&self.model, &Blocks::hash(number), Layer(0)));
            assert_eq!(was_there.unwrap(), number != NOTHING, "block {number}");
        }
        std::fs::remove_file(&self.pool).unwrap();
        let _ = std::fs::remove_file(self.pool.with_extension("tmp"));
        std::fs::remove_dir_all(&self.by_hash).unwrap();
        sync_directory(self.pool.parent().unwrap()).unwrap();
    }
}

impl Worker {
    /// Lays out the pool, and tells of it.
    pub(crate) fn lay_out(mut self) {
        let soak = Arc::clone(&self.soak);
        let (mut copies, mut given_up) = (VecDeque::new(), VecDeque::new());
        let mut number = NOTHING;
        while !self.is_over() {
            {
                let _working = soak.pause.read().unwrap();
                let counts = &soak.counts;
                let cell = self.random.below(CELLS);
                number += 1;
                match self.random.below(16) {
                    0 => self.note("replace", self.replace_pool(), &counts.pools_replaced),
                    1 | 2 => self.describe_half(number, &mut given_up),
                    3..=5 => self.note("by hash", self.store_by_hash(number), &counts.by_hash),
                    6..=8 => self.note("withdraw", self.withdraw(cell), &counts.withdrawn),
                    _ => {
                        let outcome = self.register(number, cell, &mut copies);
                        self.note("register", outcome, &counts.registered);
                    }
                }
                if copies.len() > COPIES_MAX {
                    self.close_late(&mut copies);
                }
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        while !copies.is_empty() {
            self.close_late(&mut copies);
        }
        for file in given_up {
            self.give_up(file);
        }
    }

    /// The engine withdraws what was there before it writes.
    fn register(
        &mut self, number: u64, cell: usize, copies: &mut VecDeque<(u64, Copy)>,
    ) -> io::Result<()> {
        self.withdraw(cell)?;
        let blocks = &self.soak.blocks;
        let pool = open(&blocks.pool, libc::O_WRONLY)?;
        pool.write_all_at(&blocks.bytes(number), cell as u64 * blocks.cell_bytes())?;
        close(pool)?;
        let flags = libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC;
        let mut description = open(blocks.path(number), flags)?;
        description.write_all(&blocks.describe(cell))?;
        if self.random.one_in(40) {
            let mut child = Command::new("cat");
            child.stdin(Stdio::piped()).stdout(Stdio::null());
            let child = forks::spawn_with(&mut child, &description)?;
            copies.push_back((number, Copy::Childs(child)));
        } else if self.random.one_in(3) {
            copies.push_back((number, Copy::Own(duplicate(&description))));
        }
        close(description)?;
        assert!(blocks.find(number)?.is_some(), "block {number} was registered");
        blocks.cells.lock().unwrap()[cell] = number;
        Ok(())
    }

    fn withdraw(&self, cell: usize) -> io::Result<()> {
        let blocks = &self.soak.blocks;
        let number = std::mem::replace(&mut blocks.cells.lock().unwrap()[cell], NOTHING);
        if number == NOTHING {
            return Ok(());
        }
        let hash = Blocks::hash(number);
        let was_there = of_reader(unregister_block(&blocks.model, &hash, Layer(0)))?;
        assert!(was_there, "block {number} went by itself");
        blocks.expect_absent(number)
    }

    /// Closes the oldest copy of a descriptor, whose block may have been withdrawn since.
    fn close_late(&self, copies: &mut VecDeque<(u64, Copy)>) {
        let Some((number, copy)) = copies.pop_front() else { return };
        let blocks = &self.soak.blocks;
        let closed = match copy {
            Copy::Own(file) => close(file),
            Copy::Childs(mut child) => {
                drop(child.stdin.take());
                child.wait().map(drop)
            }
        };
        let is_registered = blocks.cells.lock().unwrap().contains(&number);
        let outcome = closed.and_then(|()| blocks.is_there(number)).map(|is_there| {
            assert_eq!(is_there, is_registered, "block {number}, after a late close");
        });
        self.note("close late", outcome, &self.soak.counts.closed_late);
    }

    /// Begins a description.
    fn describe_half(&self, number: u64, given_up: &mut VecDeque<File>) {
        let blocks = &self.soak.blocks;
        let text = blocks.describe(0);
        let begun = open(blocks.path(number), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC);
        self.begin(begun, &text[..text.len() / 2], given_up);
    }

    /// Another pool under the name of the one that is there: all blocks go with that.
    fn replace_pool(&self) -> io::Result<()> {
        let blocks = &self.soak.blocks;
        let staged = blocks.pool.with_extension("tmp");
        or_absent(std::fs::remove_file(&staged))?;
        let file = File::create_new(&staged)?;
        file.set_len(blocks.pool_bytes())?;
        close(file)?;
        rename(&staged, &blocks.pool)?;
        let gone = std::mem::replace(&mut *blocks.cells.lock().unwrap(), [NOTHING; CELLS]);
        gone.into_iter().try_for_each(|number| blocks.expect_absent(number))
    }

    /// What engines do that keep a file for each block: a temporary name, a rename, a look, and away.
    fn store_by_hash(&self, number: u64) -> io::Result<()> {
        let blocks = &self.soak.blocks;
        let (path, bytes) =
            (blocks.by_hash.join(Blocks::hash(number).to_string()), blocks.bytes(number));
        let staged = path.with_extension("tmp");
        assert!(or_absent(path.metadata())?.is_none(), "{}", path.display());
        write_and_close(&staged, &bytes)?;
        rename(&staged, &path)?;
        assert_eq!(path.metadata()?.len(), bytes.len() as u64);
        assert!(std::fs::read(&path)? == bytes, "{}: other bytes", path.display());
        std::fs::remove_file(&path)?;
        assert!(or_absent(path.metadata())?.is_none(), "{}", path.display());
        Ok(())
    }

    /// Reads blocks that are registered: if one is so afterwards too, its bytes are those of its hash.
    pub(crate) fn read_blocks(mut self) {
        let soak = Arc::clone(&self.soak);
        while !self.is_over() {
            {
                let _working = soak.pause.read().unwrap();
                let number = *self.random.pick(&*soak.blocks.cells.lock().unwrap());
                let outcome = self.read_block(number).map(|is_current| {
                    if is_current {
                        count(&soak.counts.blocks_read);
                    }
                });
                self.note("read a block", outcome, &soak.counts.looked_for);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn read_block(&self, number: u64) -> io::Result<bool> {
        let blocks = &self.soak.blocks;
        let Some(block) = blocks.find(number)? else { return Ok(false) };
        let mut bytes = Vec::new();
        for layer in (0..).take(LAYERS).map(Layer) {
            let mut of_layer = vec![0; block.layer_bytes(layer)];
            of_reader(block.read(layer, 0, &mut of_layer))?;
            bytes.extend(of_layer);
        }
        let is_current = of_reader(block.is_current())?;
        assert!(!is_current || bytes == blocks.bytes(number), "block {number}: other bytes");
        Ok(is_current)
    }
}
