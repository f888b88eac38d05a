//! What a mount tells of its use: opens by the tier that had the page, in tokens, and copies that left before anybody used them.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::PathBuf;

use kvfs::page::{Dtype, ManifestFields};

use kvfs::reader::longest_prefix;

use crate::common::sys::{removexattr, rename, setxattr, sync_directory, write_and_close};
use crate::common::{Mode, Model};
use crate::place::{Place, kvfs, printed, tier};
use crate::writer::Sequence;

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
    let asked =
        "questions=1 asked_tokens=64 answered_tokens=0 prefixes=0 prefixes_found=0 opens=5 ";
    let told = mount.status(&line);
    assert!(told.starts_with(asked), "{told}");
    // Each page was opened, some of them twice; no other layer has their tokens.
    let restored = 5 * PAGE_TOKENS;
    assert!(told.contains(&format!(" restored_tokens={restored} opening_seconds=")), "{told}");
    assert_eq!(mount.status_number("restored_tokens"), restored);
    let told = printed(&kvfs(&["status"], &[mount.path()]));
    assert!(told.contains("1 prompt asked, 0 of 64 tokens found (0 %)"), "{told}");
}

in_both_modes!(what_pages_save_is_told_once_somebody_says_how_fast_the_engine_is);

fn what_pages_save_is_told_once_somebody_says_how_fast_the_engine_is(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (mount, model) = (&place.mount, Model::small());
    model.install(mount);
    let mut sequence = Sequence::new(&model, "chat");
    sequence.append(mount, &model, &(0..70).collect::<Vec<_>>());
    let page = model.page_path(mount, "chat", 0, 0);
    std::fs::read(&page).unwrap();
    let directory = model.directory(mount);
    let line = format!("model models/{}", model.name);
    let has_seconds = || mount.status(&line).contains("saved_seconds=");
    let has_metric = || {
        let metrics = std::fs::read_to_string(mount.join(".kvfs/metrics")).unwrap();
        metrics.contains("kvfs_saved_seconds")
    };
    assert!(!has_seconds() && !has_metric());
    let set = |value: &[u8]| setxattr(&directory, "user.kvfs.prefill_rate", value);
    for wrong in [&b"fast"[..], b"0", b"2.5"] {
        assert_eq!(set(wrong).unwrap_err().raw_os_error(), Some(libc::EINVAL));
    }
    set(b"2").unwrap();
    let told = mount.status(&line);
    // A page of 32 tokens at 2 a second, less the time of an open.
    assert!(told.contains("prefill_rate=2 saved_seconds=1"), "{told}");
    assert!(has_metric());
    let told = printed(&kvfs(&["status"], &[mount.path()]));
    assert!(told.contains(" s saved, at 2 tokens computed a second"), "{told}");
    removexattr(&directory, "user.kvfs.prefill_rate").unwrap();
    assert!(!has_seconds());
}

in_both_modes!(answers_names_and_hashes_are_counted_by_what_they_are_for);

fn answers_names_and_hashes_are_counted_by_what_they_are_for(mode: Mode) {
    let place = Place::new(mode, &[]);
    let (mount, model) = (&place.mount, Model::small());
    model.install(mount);
    let mut sequence = Sequence::new(&model, "chat");
    let tokens: Vec<u32> = (0..70).collect();
    sequence.append(mount, &model, &tokens);
    let found = longest_prefix(&model.directory(mount), &tokens).unwrap();
    let by_tier = |tier: &str| {
        let name = "kvfs_match_answered_tokens_total";
        mount.metric(&format!("{name}{{store=\"own\",tier=\"{tier}\"}}"))
    };
    assert_eq!(by_tier("ssd"), found.tokens);
    // What the remote alone has is told as such.
    place.wait_until_uploaded();
    let first = model.page_path(mount, "chat", 0, 0);
    printed(&kvfs(&["evict", "--to", "remote"], &[first.as_path()]));
    assert_eq!(tier(&first), "remote");
    longest_prefix(&model.directory(mount), &tokens).unwrap();
    assert_eq!(by_tier("remote"), u64::from(model.page_tokens()));

    let absent = model.directory(mount).join("prefixes/00").join("00".repeat(32));
    assert!(!absent.exists());
    assert_eq!(mount.metric("kvfs_prefix_asked_tokens_total"), u64::from(model.page_tokens()));
    assert_eq!(mount.metric("kvfs_prefix_answered_tokens_total"), 0);

    let directory = mount.files("engine");
    std::fs::create_dir_all(directory.join("deep")).unwrap();
    let file = directory.join("deep/block");
    write_and_close(&file, b"bytes").unwrap();
    assert!(!directory.join("deep/other").exists());
    std::fs::read(&file).unwrap();
    let told = mount.status("directory files/engine");
    assert!(told.ends_with(" opens=1 opened_bytes=5"), "{told}");
    let absent = mount.metric("kvfs_file_lookups_total{answer=\"absent\"}");
    assert!(absent > 0, "{absent}");
    assert_eq!(mount.metric("kvfs_opened_files_total{tier=\"ssd\"}"), 1);
    // Under another name the same.
    rename(&directory, mount.files("renamed")).unwrap();
    std::fs::read(mount.files("renamed/deep/block")).unwrap();
    let told = mount.status("directory files/renamed");
    assert!(told.ends_with(" opens=2 opened_bytes=10"), "{told}");
}
