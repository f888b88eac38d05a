//! Blocks in a file that an engine lays out itself: registered, found, read, and never dangling.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;

use kvfs::page::block_map::{BlockMap, Part, format_block};
use kvfs::page::{Geometry, Layer, PageView, PrefixHash};
use kvfs::reader::{Block, ReadError, register_block, unregister_block};

use crate::common::sys::{assert_errno, map_mut, open, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount, forks};

in_both_modes!(
    a_block_is_found_by_its_hash_and_read_as_a_page,
    a_block_goes_with_its_bytes,
    a_withdrawn_block_does_not_come_back_with_a_copy_of_its_descriptor,
    a_refused_description_is_not_registered_by_a_later_close,
    a_description_that_cannot_be_is_refused,
    a_block_is_registered_with_the_command_line,
);

const HASH: PrefixHash = PrefixHash([0xab; 32]);
const POOL_BYTES: u64 = 1 << 20;

/// A pool with a page of both layers, K and V in two buffers each, none of them in order.
struct Engine {
    mount: Mount,
    model: Model,
    pool: File,
}

impl Engine {
    fn new(mode: Mode) -> Engine {
        let (mount, model) = (Mount::new(mode), Model::small());
        model.install(&mount);
        let path = mount.files("pool");
        let pool = File::options().read(true).write(true).create_new(true).open(path).unwrap();
        pool.set_len(POOL_BYTES).unwrap();
        Engine { mount, model, pool }
    }

    fn directory(&self) -> PathBuf {
        self.model.directory(&self.mount)
    }

    fn geometry(&self) -> &Geometry {
        self.model.manifest.geometry()
    }

    fn map() -> BlockMap {
        BlockMap {
            file: "files/pool".to_owned(),
            layer: 0,
            shape: [2, 2, 2],
            sizes: [1024, 1024],
            offsets: vec![500_000, 100, 1 << 19, 7168, 0x8000, 0x9001, 900_000, POOL_BYTES - 1024],
            inode: None,
            registration: None,
        }
    }

    /// Puts pages where the block says that they are.
    fn fill(&self, seed: u64) -> Vec<Vec<u8>> {
        let pages: Vec<_> = (0..2).map(|layer| self.model.page(layer, 0, seed)).collect();
        let block = Engine::map();
        let mut memory = map_mut(&self.pool);
        for (layer, page) in (0..).map(Layer).zip(&pages) {
            let view = PageView::parse(page, self.geometry()).unwrap();
            for (part, bytes) in [(Part::K, view.k()), (Part::V, view.v())] {
                for (buffer, piece) in block.buffers(layer, part).zip(bytes.chunks(1024)) {
                    let start = usize::try_from(buffer.start).unwrap();
                    memory[start..start + piece.len()].copy_from_slice(piece);
                }
            }
        }
        pages
    }

    fn find(&self) -> Option<Block> {
        Block::find(&self.directory(), &HASH, Layer(0)).unwrap()
    }

    fn register(&self) -> Block {
        register_block(&self.directory(), &HASH, &Engine::map()).unwrap();
        self.find().expect("a block that was registered")
    }

    fn path(&self) -> PathBuf {
        self.directory().join("blocks").join(format_block(&HASH, Layer(0)))
    }
}

fn a_block_is_found_by_its_hash_and_read_as_a_page(mode: Mode) {
    let engine = Engine::new(mode);
    assert!(engine.find().is_none());
    let pages = engine.fill(7);
    let block = engine.register();
    assert!(engine.path().is_file());
    for (layer, page) in (0..).map(Layer).zip(&pages) {
        let view = PageView::parse(page, engine.geometry()).unwrap();
        let mut bytes = vec![0; block.layer_bytes(layer)];
        let kv = block.read(layer, 0, &mut bytes).unwrap();
        let page = kvfs::attention::KvBlock::page(&view, 0);
        assert_eq!((kv.k.bytes, kv.k.strides), (page.k.bytes, page.k.strides));
        assert_eq!((kv.tokens, kv.dtype), (page.tokens, page.dtype));
        assert!(bytes[view.k().len()..] == *view.v());
    }
    let outcome = block.read(Layer(2), 0, &mut []);
    assert!(matches!(outcome, Err(ReadError::Arguments(_))), "{outcome:?}");
    let other = Block::find(&engine.directory(), &PrefixHash([1; 32]), Layer(0)).unwrap();
    assert!(other.is_none());
    assert!(block.is_current().unwrap());
    // The buffers are used for something else: registering again is another registration.
    engine.fill(8);
    let again = engine.register();
    assert!(!block.is_current().unwrap() && again.is_current().unwrap());
    assert_eq!(engine.mount.status("registered_blocks"), "1");
    assert!(unregister_block(&engine.directory(), &HASH, Layer(0)).unwrap());
    assert!(!unregister_block(&engine.directory(), &HASH, Layer(0)).unwrap());
    assert!(!again.is_current().unwrap() && engine.find().is_none());
    assert_eq!(engine.mount.status("registered_blocks"), "0");
    assert_eq!(engine.mount.status("errors"), "0");
}

fn a_withdrawn_block_does_not_come_back_with_a_copy_of_its_descriptor(mode: Mode) {
    let engine = Engine::new(mode);
    engine.fill(7);
    let text = serde_json::to_vec(&Engine::map()).unwrap();
    let description = open(engine.path(), libc::O_WRONLY | libc::O_CREAT).unwrap();
    description.write_all_at(&text, 0).unwrap();
    let mut child = Command::new("cat");
    child.stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
    let mut child = forks::spawn_with(&mut child, &description).unwrap();
    let copy = crate::common::sys::duplicate(&description);
    crate::common::sys::close(description).unwrap();
    let first = engine.find().expect("a block that was registered");
    assert!(unregister_block(&engine.directory(), &HASH, Layer(0)).unwrap());
    engine.fill(8);
    crate::common::sys::close(copy).unwrap();
    drop(child.stdin.take());
    child.wait().unwrap();
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(engine.find().is_none() && !first.is_current().unwrap());
    assert_eq!(engine.mount.status("registered_blocks"), "0");
}

fn a_refused_description_is_not_registered_by_a_later_close(mode: Mode) {
    use crate::common::sys::{close, duplicate};
    let engine = Engine::new(mode);
    let text = serde_json::to_vec(&Engine::map()).unwrap();
    let (pool, away) = (engine.mount.files("pool"), engine.mount.files("away"));
    rename(&pool, &away).unwrap();
    let _quiet = forks::no_forks();
    let description = open(engine.path(), libc::O_WRONLY | libc::O_CREAT).unwrap();
    let copies = [duplicate(&description), duplicate(&description)];
    description.write_all_at(&text[..100], 0).unwrap();
    assert_errno(close(description), libc::EINVAL);
    // It was half of one, which the other half completes.
    let [first, second] = copies;
    first.write_all_at(&text[100..], 100).unwrap();
    assert_errno(close(first), libc::EINVAL);
    rename(away, pool).unwrap();
    assert_errno(close(second), libc::EINVAL);
    assert_eq!(engine.mount.status("registered_blocks"), "0");
}

fn a_block_goes_with_its_bytes(mode: Mode) {
    type Act = fn(&Engine);
    let acts: [(&str, Act); 6] = [
        ("unlinked", |engine| std::fs::remove_file(engine.mount.files("pool")).unwrap()),
        ("replaced", |engine| {
            let other = engine.mount.files("other");
            write_and_close(&other, &vec![1; 1 << 20]).unwrap();
            rename(other, engine.mount.files("pool")).unwrap();
        }),
        ("cut", |engine| engine.pool.set_len(POOL_BYTES - 1).unwrap()),
        ("cut and extended", |engine| {
            engine.pool.set_len(1000).unwrap();
            engine.pool.set_len(POOL_BYTES).unwrap();
        }),
        ("truncated", |engine| {
            let pool = open(engine.mount.files("pool"), libc::O_WRONLY | libc::O_TRUNC).unwrap();
            pool.set_len(POOL_BYTES).unwrap();
        }),
        ("renamed", |engine| {
            rename(engine.mount.files("pool"), engine.mount.files("elsewhere")).unwrap();
        }),
    ];
    for (name, act) in acts {
        let engine = Engine::new(mode);
        engine.fill(7);
        let block = engine.register();
        act(&engine);
        assert!(engine.find().is_none(), "{name}");
        // A file that only moved has its bytes where they were.
        assert_eq!(block.is_current().unwrap(), name == "renamed", "{name}");
    }
    // Nobody has synced what was mapped, so nobody says after a crash that it is there.
    let mut engine = Engine::new(mode);
    engine.fill(7);
    engine.register();
    engine.pool = File::open("/dev/null").unwrap();
    sync_directory(engine.mount.path()).unwrap();
    engine.mount.crash();
    assert_eq!(engine.mount.files("pool").metadata().unwrap().len(), POOL_BYTES);
    assert!(engine.find().is_none());
}

fn a_description_that_cannot_be_is_refused(mode: Mode) {
    let engine = Engine::new(mode);
    let directory = engine.directory();
    std::fs::write(engine.mount.files("short"), [0; 4096]).unwrap();
    let refused: [fn(&mut BlockMap); 7] = [
        |block| "files/none".clone_into(&mut block.file),
        |block| "files/short".clone_into(&mut block.file),
        |block| "files/../files/pool".clone_into(&mut block.file),
        |block| "models/small/manifest.json".clone_into(&mut block.file),
        |block| block.shape = [3, 2, 2],
        |block| block.sizes = [1024, 512],
        |block| block.offsets[3] = POOL_BYTES - 1023,
    ];
    for change in refused {
        let mut block = Engine::map();
        change(&mut block);
        let outcome = register_block(&directory, &HASH, &block);
        let is_refused = matches!(&outcome, Err(ReadError::Io { error, .. })
            if error.raw_os_error() == Some(libc::EINVAL));
        assert!(is_refused, "{block:?}: {outcome:?}");
        assert!(engine.find().is_none());
    }
    assert_errno(write_and_close(engine.path(), b"{}"), libc::EINVAL);
    let wrong_layer = directory.join("blocks").join(format_block(&HASH, Layer(1)));
    let text = serde_json::to_vec(&Engine::map()).unwrap();
    assert_errno(write_and_close(wrong_layer, &text), libc::EINVAL);
    let blocks = directory.join("blocks");
    assert_errno(write_and_close(blocks.join("abc"), b"{}"), libc::EPERM);
    assert_errno(std::fs::create_dir(blocks.join("abc")), libc::EPERM);
    assert_errno(rename(engine.mount.files("short"), engine.path()), libc::EPERM);
    assert_eq!(std::fs::read_dir(blocks).unwrap().count(), 0);
    assert!(engine.mount.errors().iter().any(|line| line.contains("files/none")));
    // Only the end of a description can be written.
    let file = open(engine.path(), libc::O_WRONLY | libc::O_CREAT).unwrap();
    assert_errno(file.write_at(b"x", 5), libc::EPERM);
}

fn a_block_is_registered_with_the_command_line(mode: Mode) {
    let engine = Engine::new(mode);
    engine.fill(7);
    let map = engine.mount.beside("block.json");
    let map = map.to_str().unwrap();
    let run = |word: &str, further: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvfs"));
        let name = format_block(&HASH, Layer(0));
        command.args(["block", word]).arg(engine.directory()).arg(name).args(further);
        forks::output(&mut command)
    };
    std::fs::write(map, serde_json::to_vec(&Engine::map()).unwrap()).unwrap();
    let registered = run("register", &[map]);
    assert!(registered.status.success(), "{}", String::from_utf8_lossy(&registered.stderr));
    let shown = run("show", &[]);
    let shown: BlockMap = serde_json::from_slice(&shown.stdout).unwrap();
    assert_eq!(BlockMap { inode: None, registration: None, ..shown }, Engine::map());
    assert!(run("unregister", &[]).status.success());
    std::fs::write(map, b"{}").unwrap();
    for (word, further) in [("unregister", &[][..]), ("show", &[]), ("register", &[map])] {
        let output = run(word, further);
        assert_eq!(output.status.code(), Some(1), "{word}");
        assert_eq!(String::from_utf8_lossy(&output.stderr).lines().count(), 1);
    }
}
