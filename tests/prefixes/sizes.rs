//! Sizes that clients choose: at its limit each of them works, one more is refused, and memory stays bounded.

#![allow(clippy::print_stdout, reason = "how long it took is part of the result")]

use std::fs::{self, File};
use std::io::Write;
use std::time::{Duration, Instant};

use kvfs::page::block_map::{BUFFERS_MAX, BlockMap, format_block};
use kvfs::page::limits::MAX_MANIFEST_BYTES;
use kvfs::page::{Layer, MAX_POSITIONS_BYTES, PrefixHash};
use kvfs::reader::longest_prefix;

use crate::common::sys::{assert_errno, rename, sync_directory, write_and_close};
use crate::common::{Mode, Model, Mount};
use crate::writer::Sequence;

in_both_modes!(
    a_manifest_may_be_a_mebibyte,
    positions_may_be_as_long_as_their_runs,
    positions_of_too_many_runs_take_no_memory,
    a_block_may_have_65536_buffers,
    a_long_file_of_tokens_goes_as_fast_as_it_came,
);

/// Of a file of 16 MiB: 131072 pages.
const TOKENS: u32 = 4 << 20;

/// The most memory that the daemon ever had, in MiB.
fn most_memory(mount: &Mount) -> u64 {
    let status = fs::read_to_string(format!("/proc/{}/status", mount.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

fn a_manifest_may_be_a_mebibyte(mode: Mode) {
    let (mount, model) = (Mount::new(mode), Model::small());
    fs::create_dir(model.directory(&mount)).unwrap();
    let manifest = model.directory(&mount).join("manifest.json");
    let mut json = model.manifest.to_json();
    json.push_str(&" ".repeat(MAX_MANIFEST_BYTES + 1 - json.len()));
    assert_errno(write_and_close(&manifest, json.as_bytes()), libc::EINVAL);
    json.pop();
    write_and_close(&manifest, json.as_bytes()).unwrap();
    write_and_close(model.page_path(&mount, "chat", 0, 0), &model.page(0, 0, 1)).unwrap();
}

/// A sequence of two pages, of which tokens say nothing from row 32 on; what a prompt finds of it then.
struct Edited {
    mount: Mount,
    model: Model,
    sequence: Sequence,
}

impl Edited {
    fn new(mode: Mode) -> Edited {
        let (mount, model) = (Mount::new(mode), Model::small());
        model.install(&mount);
        let mut sequence = Sequence::new(&model, "chat");
        sequence.append(&mount, &model, &(0..64).collect::<Vec<_>>());
        let edited = Edited { mount, model, sequence };
        assert_eq!(edited.found(), 64);
        edited
    }

    fn found(&self) -> u64 {
        longest_prefix(&self.model.directory(&self.mount), &self.sequence.tokens).unwrap().tokens
    }

    /// What is found when `positions.json` is this text and spaces up to a length.
    fn found_with(&self, text: &str, length: usize) -> u64 {
        let path = self.model.sequence(&self.mount, "chat").join("positions.json");
        let temporary = path.with_extension("tmp");
        let mut file = File::create(&temporary).unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file.write_all(&vec![b' '; length.saturating_sub(text.len())]).unwrap();
        drop(file);
        rename(temporary, path).unwrap();
        self.found()
    }
}

fn positions_may_be_as_long_as_their_runs(mode: Mode) {
    let edited = Edited::new(mode);
    let text = r#"{"schema_version":1,"edited_at":32,"runs":[[0,64,0,0]],"next":[64,64]}"#;
    assert_eq!(edited.found_with(text, MAX_POSITIONS_BYTES), 32);
    assert_eq!(edited.found_with(text, MAX_POSITIONS_BYTES + 1), 0);
    assert_eq!(edited.found_with(text, 0), 32);
    // The text, and nothing that is made of it.
    let most = most_memory(&edited.mount);
    assert!(most < 300, "{most} MiB");
    assert_eq!(edited.mount.status("state"), "ok");
}

fn positions_of_too_many_runs_take_no_memory(mode: Mode) {
    let edited = Edited::new(mode);
    let before = most_memory(&edited.mount);
    let runs = "[9,1,9,0],".repeat((MAX_POSITIONS_BYTES - 200) / 10);
    let runs = runs.trim_end_matches(',');
    let text = format!(r#"{{"schema_version":1,"edited_at":32,"runs":[{runs}],"next":[99,99]}}"#);
    assert!(text.len() <= MAX_POSITIONS_BYTES);
    assert_eq!(edited.found_with(&text, 0), 0);
    let taken = most_memory(&edited.mount) - before;
    assert!(taken < 200, "{taken} MiB for {} MiB of text", text.len() >> 20);
}

fn a_block_may_have_65536_buffers(mode: Mode) {
    let mount = Mount::new(mode);
    // K of a page has a byte for each buffer, and so has V.
    let model = Model::with(|fields| {
        fields.num_layers = 1;
        fields.head_dim = 256;
    });
    model.install(&mount);
    fs::write(mount.files("pool"), vec![0; 1 << 20]).unwrap();
    let block = model.directory(&mount).join("blocks");
    let block = block.join(format_block(&PrefixHash([0xab; 32]), Layer(0)));
    let register = |buffers: u32| {
        let map = BlockMap {
            file: "files/pool".to_owned(),
            layer: 0,
            shape: [1, 2, buffers],
            sizes: [1, 1],
            offsets: (0..u64::from(buffers) * 2).collect(),
            inode: None,
            registration: None,
        };
        write_and_close(&block, serde_json::to_string(&map).unwrap().as_bytes())
    };
    let half = u32::try_from(BUFFERS_MAX / 2).unwrap();
    assert_errno(register(half + 1), libc::EINVAL);
    register(half).unwrap();
    assert!(fs::read_to_string(&block).unwrap().contains("registration"));
}

/// Nothing limits tokens, with which a sequence without pages is indexed, too.
fn a_long_file_of_tokens_goes_as_fast_as_it_came(mode: Mode) {
    let edited = Edited::new(mode);
    let path = edited.model.tokens_path(&edited.mount, "long");
    let bytes: Vec<u8> = (0..TOKENS).flat_map(u32::to_le_bytes).collect();
    write_and_close(&path, &bytes).unwrap();
    let timed = || {
        let begun = Instant::now();
        assert_eq!(edited.found(), 64);
        begun.elapsed()
    };
    let came = timed();
    sync_directory(edited.mount.path()).unwrap();
    fs::remove_dir_all(path.parent().unwrap()).unwrap();
    let gone = timed();
    println!("{came:?} to index {TOKENS} tokens, {gone:?} to forget them");
    assert!(gone < came * 3 + Duration::from_secs(1), "{came:?}, {gone:?}");
    let most = most_memory(&edited.mount);
    assert!(most < 300, "{most} MiB");
}
