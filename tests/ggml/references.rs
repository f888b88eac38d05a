//! Slots whose pages are mapped into the engine's cache, instead of being read.

use std::os::unix::fs::FileExt;

use crate::common::Mode;
use crate::conversation::{Conversation, REFERRED_TOKENS, TOKENS};

/// K, or V, of one token and layer of the tiny model: two heads of 64 in f16.
const ROW_BYTES: usize = 2 * 64 * 2;
/// Of a slot of version 3 with one token more than cells, before the rows of the first layer.
const HEAD_BYTES: u64 = 28 + 4 * (TOKENS as u64 + 1) + 12 * TOKENS as u64 + 12;

/// What the engine computes is the same to the bit, the pages are not in its files, and what it changes
/// is not in the pages.
fn pages_are_mapped(mode: Mode) {
    require!(llama, cc);
    let conversation = Conversation::new(mode);
    let model = conversation.model("mine");
    let (read, mapped) = (model.join("slots/chat.bin"), model.join("slots/chat.ref"));
    assert_eq!(read.metadata().unwrap().len(), mapped.metadata().unwrap().len());
    let page = model.join("sequences/chat/000/0000000.safetensors");
    let before = std::fs::read(&page).unwrap();
    for rest in ["", "--remove-from 50 --remove-to 90 --shift 1"] {
        let expected = conversation.continued(&read, None, rest);
        let found = conversation.continued(&mapped, Some(&model), rest);
        assert_eq!(found.tokens, expected.tokens, "{rest}");
        assert!(found.logits == expected.logits, "{rest}");
        let cache = conversation.mount.join("files/llama/0/cache_k_l0");
        let rows = std::fs::read(cache).unwrap();
        let (pages, behind) = rows.split_at(REFERRED_TOKENS * ROW_BYTES);
        assert!(pages.iter().all(|byte| *byte == 0), "{rest}: the pages were copied");
        assert!(behind[..ROW_BYTES].iter().any(|byte| *byte != 0), "{rest}");
    }
    assert!(std::fs::read(&page).unwrap() == before, "the page has changed");
}

in_both_modes!(pages_are_mapped);

#[test]
fn forged_and_foreign_references_are_refused() {
    require!(fuse, llama, cc);
    let conversation = Conversation::new(Mode::Served);
    let (mine, other) = (conversation.model("mine"), conversation.model("other"));
    let slot = mine.join("slots/chat.ref");
    conversation.assert_refused(&slot, Some(&other), "was not made for this model, or was changed");
    conversation.assert_refused(&slot, None, "a slot of references, and no KVFS_MODEL");
    let bytes = std::fs::read(&slot).unwrap();
    let copy = conversation.directory.path().join("copy.ref");
    let changed = |change: &dyn Fn(&std::fs::File)| {
        std::fs::write(&copy, &bytes).unwrap();
        change(&std::fs::File::options().write(true).open(&copy).unwrap());
        copy.clone()
    };
    // A copy is as good; another prefix, or another page's place, is not.
    conversation.continued(&changed(&|_| {}), Some(&mine), "");
    let forged = changed(&|file| file.write_all_at(&[7], HEAD_BYTES + 20).unwrap());
    conversation.assert_refused(
        &forged,
        Some(&mine),
        "was not made for this model, or was changed",
    );
    let layer_bytes = (12 + TOKENS * ROW_BYTES) as u64;
    let elsewhere = changed(&|file| {
        let reference = &bytes[usize::try_from(HEAD_BYTES + layer_bytes).unwrap()..][..96];
        file.write_all_at(reference, HEAD_BYTES).unwrap();
    });
    conversation.assert_refused(&elsewhere, Some(&mine), "a reference is of another layer");
    let cut = changed(&|file| {
        let page_bytes = (128 * ROW_BYTES) as u64;
        file.write_all_at(&[0xff; 96], HEAD_BYTES + page_bytes).unwrap();
    });
    conversation.assert_refused(&cut, Some(&mine), "was not made for this model, or was changed");
    // Its page is gone.
    let page = "sequences/chat/001/0000128.safetensors";
    std::fs::remove_file(mine.join(page)).unwrap();
    conversation.assert_refused(&changed(&|_| {}), Some(&mine), "rows of the slot were not loaded");
}
