//! Slots that are written into `slots/` become sequences.

use std::fs::File;
use std::io::{Seek, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvfs::sequence::Sequences;

use crate::common::mount::scratch_directory;
use crate::common::sys::close;
use crate::common::{Mode, Mount, within};
use crate::conversation::kvfs;
use crate::engine::{Ran, command, finish};
use crate::gguf::Model;
use crate::program::run;
use crate::slot_file;

const PAGE_TOKENS: usize = 128;

/// A model without a conversation.
struct Saved {
    mount: Mount,
    directory: tempfile::TempDir,
}

impl Saved {
    fn new(mode: Mode) -> Self {
        let directory = scratch_directory();
        Model::write_tiny(&directory.path().join("tiny.gguf"));
        let this = Self { mount: Mount::new(mode), directory };
        this.create("tiny", "2");
        this
    }

    fn create(&self, name: &str, heads: &str) {
        let mut create = kvfs("create", &[&self.mount.join("models").join(name)]);
        create.args(["--layers", "4", "--kv-heads", heads, "--head-dim", "64"]);
        run(create.args(["--page-tokens", "128", "--layout", "nhd"]));
    }

    fn model(&self) -> PathBuf {
        self.mount.join("models/tiny")
    }

    fn slot(&self, name: &str) -> PathBuf {
        self.model().join("slots").join(name)
    }

    /// Names of sequences, and of what is being made of them.
    fn sequences(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.model().join("sequences")).unwrap();
        let mut names: Vec<_> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    fn command(&self, arguments: &str, with_backend: bool) -> std::process::Command {
        let cache = with_backend.then_some(self.mount.path());
        let gguf = self.directory.path().join("tiny.gguf");
        let mut command = command(&gguf, &format!("--flash on --threads 1 {arguments}"), cache);
        command.env("KVFS_MODEL", self.model());
        command
    }

    fn engine(&self, arguments: &str, with_backend: bool) -> Ran {
        let ran = finish(None, &mut self.command(arguments, with_backend));
        if with_backend {
            ran.assert_attention_was_ours();
        }
        ran
    }

    /// The engine cannot save, what was there stays, and the mount says why.
    #[track_caller]
    fn assert_refused(&self, path: &Path, arguments: &str, why: &str) {
        let before = self.sequences();
        let arguments = format!("{arguments} --predict 0 --save {}", path.display());
        let output = self.command(&arguments, true).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains("not saved"), "{text}");
        let errors = self.mount.errors();
        assert!(errors.iter().any(|line| line.contains(why)), "not said: {why}\n{errors:?}");
        assert_eq!(self.sequences(), before);
    }
}

/// An engine saves there, another goes on by reference: nobody has imported anything.
fn an_engine_saves_pages(mode: Mode) {
    require!(llama, cc);
    let saved = Saved::new(mode);
    let local = saved.directory.path().join("slot");
    let save = |tokens: usize, path: &Path, with_backend| {
        let sizes = format!("--prompt-tokens {tokens} --predict 0");
        saved.engine(&format!("{sizes} --save {}", path.display()), with_backend);
    };
    save(300, &local, true);
    save(300, &saved.slot("chat.bin"), true);
    let expected = std::fs::read(&local).unwrap();
    assert!(std::fs::read(saved.slot("chat.bin")).unwrap() == expected);
    let page = |name: &str| {
        let page = format!("sequences/{name}/003/{PAGE_TOKENS:07}.safetensors");
        saved.model().join(page).metadata().map(|metadata| (metadata.ino(), metadata.mode()))
    };
    let first = page("chat").unwrap();
    assert_eq!(first.1 & 0o777, 0o644);

    let go_on = |slot: &Path, with_backend| {
        saved.engine(&format!("--predict 8 --load {}", slot.display()), with_backend)
    };
    let read = go_on(&local, true);
    let mapped = go_on(&saved.slot("chat.ref"), true);
    assert_eq!(mapped.tokens, read.tokens);
    assert!(mapped.logits == read.logits);

    // Under another name, by stock: the whole pages of both have the same tokens, but stock rounds
    // elsewhere. By kvfs again they are the same bytes, and stored once.
    save(300, &saved.slot("stock.ref"), false);
    save(260, &saved.slot("shorter.bin"), true);
    assert_eq!(page("shorter").unwrap(), first);
    assert_eq!(saved.sequences(), ["chat", "shorter", "stock"]);
    // What is saved again takes the place of what was.
    save(200, &saved.slot("chat.bin"), true);
    assert!(page("chat").is_err());
    assert_eq!(saved.sequences(), ["chat", "shorter", "stock"]);
    assert!(std::fs::read(saved.slot("chat.bin")).unwrap().len() < expected.len());
}

/// What cannot become a sequence is not taken, and the engine hears of it.
fn other_slots_are_refused(mode: Mode) {
    require!(llama, cc);
    let saved = Saved::new(mode);
    saved.create("other", "1");
    slot_file::write(&saved.slot("chat.bin"), &Model::tiny(), 300);
    let before = std::fs::read(saved.slot("chat.bin")).unwrap();
    let slot = saved.slot("chat.bin");
    saved.assert_refused(&slot, "--flash off", "V transposed: save it with flash attention on");
    saved.assert_refused(&slot, "--type bf16", "has K of ggml type 30");
    saved.assert_refused(
        &saved.slot("chat.bin4"),
        "",
        "is of version 3, and called one of version 4",
    );
    let other = saved.mount.join("models/other/slots/chat.bin");
    saved.assert_refused(
        &other,
        "",
        "layer 0 has K of 256 bytes for each token, the manifest of 128",
    );

    let errno = |outcome: std::io::Result<File>| outcome.unwrap_err().raw_os_error();
    for name in ["chat", ".chat.bin", "chat.tmp.bin", "chat~.bin", ".bin", "chat.bin.tmp"] {
        assert_eq!(errno(File::create(saved.slot(name))), Some(libc::EPERM), "{name}");
    }
    // Only from its beginning to its end.
    assert_eq!(errno(File::options().write(true).open(&slot)), Some(libc::EPERM));
    let mut file = File::create(saved.slot("gap.bin")).unwrap();
    file.write_all(&before[..100]).unwrap();
    file.seek(std::io::SeekFrom::Start(200)).unwrap();
    assert_eq!(file.write(&before[200..]).unwrap_err().raw_os_error(), Some(libc::EPERM));
    drop(file);
    assert_eq!(saved.sequences(), ["chat"]);
    assert!(std::fs::read(&slot).unwrap() == before);
}

/// Holes are where tokens were removed.
#[test]
fn holes_are_refused_before_any_row() {
    require!(fuse);
    let saved = Saved::new(Mode::Served);
    let path = saved.directory.path().join("slot");
    slot_file::write(&path, &Model::tiny(), 300);
    let mut bytes = std::fs::read(&path).unwrap();
    // The position of the last cell.
    let cell = 20 + 4 * 301 + 12 * 299;
    bytes[cell..cell + 4].copy_from_slice(&777_u32.to_le_bytes());
    let mut file = File::create(saved.slot("chat.bin")).unwrap();
    let pieces = bytes.chunks(4096).position(|piece| file.write_all(piece).is_err());
    assert!(pieces.is_some_and(|pieces| pieces < 4), "{pieces:?}");
    drop(file);
    let errors = saved.mount.errors();
    assert!(errors[0].contains("cell 299 is at position 777"), "{errors:?}");
    assert_eq!(errors.len(), 1, "{errors:?}");
    assert!(!saved.slot("chat.bin").exists());
}

/// The daemon is killed while a slot is written, and while it becomes a sequence: the one that had
/// the name is there, or the other.
fn the_daemon_is_killed_while_it_saves(mode: Mode) {
    let mut saved = Saved::new(mode);
    let slot = saved.slot("chat.bin");
    let path = saved.directory.path().join("slot");
    slot_file::write(&path, &Model::tiny(), 1000);
    let old = std::fs::read(&path).unwrap();
    slot_file::write(&path, &Model::tiny(), 1900);
    let new = std::fs::read(&path).unwrap();
    for patience in [None, Some(0), Some(3), Some(6), Some(12), Some(200)] {
        std::fs::write(&slot, &old).unwrap();
        run(&mut kvfs("sync", &[saved.mount.path()]));
        let mut file = File::create(&slot).unwrap();
        match patience {
            None => file.write_all(&new[..new.len() / 2]).unwrap(),
            Some(_) => file.write_all(&new).unwrap(),
        }
        let closing = std::thread::Builder::new().name("closing".to_owned());
        let closing = closing.spawn(move || drop(file)).unwrap();
        std::thread::sleep(Duration::from_millis(patience.unwrap_or(0)));
        saved.mount.crash();
        closing.join().unwrap();
        let found = std::fs::read(&slot).unwrap();
        assert!(found == old || found == new, "{patience:?}: {} bytes", found.len());
    }
    std::fs::write(&slot, &new).unwrap();
    assert!(std::fs::read(&slot).unwrap() == new);
    assert_eq!(saved.sequences(), ["chat"], "what was not finished is left");
    assert!(saved.mount.unmount().success());
    run(kvfs("fsck", &[saved.mount.store()]).args(["--read-data-subset", "1/1"]));
}

/// Saving and operations make something beside the sequence, and remove what a crash left of that. Neither takes
/// what the other is making for such a rest.
fn saving_and_operations_leave_each_other_alone(mode: Mode) {
    let mut saved = Saved::new(mode);
    let (path, slot) = (saved.directory.path().join("slot"), saved.slot("chat.bin"));
    slot_file::write(&path, &Model::tiny(), 1900);
    let bytes = std::fs::read(&path).unwrap();
    let save = || {
        let mut file = File::create(&slot)?;
        file.write_all(&bytes)?;
        close(file)
    };
    save().unwrap();
    let sequences = Sequences::open(&saved.model()).unwrap();
    // Nothing is at these positions.
    let operate = || sequences.seq_rm("chat", 5000..);
    std::thread::scope(|scope| {
        let saving = scope.spawn(|| (0..12).try_for_each(|_| save()));
        while !saving.is_finished() {
            // They may lose the sequence that they have listed.
            let _ = operate();
            let _ = sequences.seq_add("chat", 1000.., 1);
            let _ = sequences.seq_rm("chat", 1500..);
        }
        saving.join().unwrap().unwrap();
    });
    save().unwrap();
    // An operation that failed has left its work to the next one.
    operate().unwrap();
    assert_eq!(saved.sequences(), ["chat"]);
    assert!(std::fs::read(&slot).unwrap() == bytes);

    let make_work = |name: &str| {
        let layer = saved.model().join("sequences").join(name).join("000");
        std::fs::create_dir_all(&layer).unwrap();
        std::fs::write(layer.join("0000000.tail"), []).unwrap();
    };
    make_work("chat~");
    make_work("chat~~");
    save().unwrap();
    assert_eq!(saved.sequences(), ["chat", "chat~"]);
    make_work("chat~~");
    operate().unwrap();
    assert_eq!(saved.sequences(), ["chat", "chat~~"]);

    // Nobody may ever save under that name again.
    make_work("gone~");
    make_work("gone~~");
    run(&mut kvfs("sync", &[saved.mount.path()]));
    saved.mount.crash();
    within(Duration::from_secs(20), "what is left of a save goes after a crash", || {
        (saved.sequences() == ["chat", "gone~"]).then_some(())
    });
}

in_both_modes!(
    an_engine_saves_pages,
    other_slots_are_refused,
    the_daemon_is_killed_while_it_saves,
    saving_and_operations_leave_each_other_alone,
);
