//! What a mount tells of its use: opens by the tier that had the page, in tokens, and copies that left before anybody used them.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use kvfs::page::{Dtype, ManifestFields};

use crate::common::sys::{rename, sync_directory, write_and_close};
use crate::common::{Mode, Model};
use crate::place::{Place, kvfs, printed, tier};

in_both_modes!(opens_are_told_by_tier_and_what_left_by_its_use);

/// A page file is 256 KiB + 4 KiB: memory has room for three.
const PAGE_TOKENS: u64 = 128;

fn opens_are_told_by_tier_and_what_left_by_its_use(mode: Mode) {
    let place = Place::new(mode, &["--ram", "1M"]);
    let mount = &place.mount;
    let model = Model::with(|fields| {
        *fields = ManifestFields::new("test/one", Dtype::F16, 1, 8, 64);
        fields.page_tokens = 128;
    });
    model.install(mount);
    let pages: Vec<PathBuf> = (0..5)
        .map(|number| {
            let path = model.page_path(mount, "chat", 0, number * PAGE_TOKENS);
            let temporary = path.with_extension("tmp");
            write_and_close(&temporary, &model.page(0, number * PAGE_TOKENS, number)).unwrap();
            rename(&temporary, &path).unwrap();
            // What is not on the disk yet cannot leave memory.
            sync_directory(mount.path()).unwrap();
            path
        })
        .collect();
    let tokens = || {
        ["ram", "ssd", "remote"].map(|tier| mount.status_number(&format!("opened_tokens_{tier}")))
    };
    let of_memory = |name: &str| mount.metric(&format!("{name}{{tier=\"ram\"}}"));
    let (in_memory, left): (Vec<_>, Vec<_>) = pages.iter().partition(|path| tier(path) == "ram");
    assert_eq!((in_memory.len(), left.len(), tokens()), (3, 2, [0; 3]));
    assert_eq!(of_memory("kvfs_evicted_unused_total"), 2);
    assert_eq!(of_memory("kvfs_evicted_age_seconds_count"), 2);

    // The second time the kernel still has it.
    for times in 1..=2 {
        std::fs::read(in_memory[0]).unwrap();
        assert_eq!(tokens(), [times * PAGE_TOKENS, 0, 0]);
    }
    assert_eq!(of_memory("kvfs_evicted_opens_total"), 0);
    std::fs::read(left[0]).unwrap();
    assert_eq!(tokens(), [2 * PAGE_TOKENS, PAGE_TOKENS, 0]);
    assert_eq!(of_memory("kvfs_evicted_opens_total"), 1);
    assert_eq!(mount.metric("kvfs_opened_pages_total{tier=\"ssd\"}"), 1);

    place.wait_until_uploaded();
    printed(&kvfs(&["evict", "--to", "remote"], &[left[1].as_path()]));
    assert_eq!(tier(left[1]), "remote");
    std::fs::read(left[1]).unwrap();
    assert_eq!(tokens(), [2 * PAGE_TOKENS, PAGE_TOKENS, PAGE_TOKENS]);
    assert_eq!(mount.metric("kvfs_evicted_opens_total{tier=\"ssd\"}"), 1);
    std::fs::read(left[1]).unwrap();
    assert_eq!(tokens()[2], PAGE_TOKENS, "it is here now");

    // A prompt that is asked counts what is asked and what is found: nothing, for there are no tokens.
    let path = model.directory(mount).join("prefixes/match");
    let mut file = File::options().read(true).write(true).open(path).unwrap();
    file.write_all(&[7; 4 * 64]).unwrap();
    file.rewind().unwrap();
    file.read_to_end(&mut Vec::new()).unwrap();
    let prompts = ["asked_tokens", "answered_tokens"].map(|key| mount.status_number(key));
    assert_eq!(prompts, [64, 0]);
    // Which model that was for.
    let line = format!("model models/{}", model.name);
    assert_eq!(mount.status(&line), "questions=1 asked_tokens=64 answered_tokens=0");
    let told = printed(&kvfs(&["status"], &[mount.path()]));
    assert!(told.contains("1 prompt asked, 0 of 64 tokens found (0 %)"), "{told}");
}
