//! Slots whose pages are mapped into the engine's cache, instead of being read.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;

use crate::common::Mode;
use crate::conversation::{Conversation, REFERRED_TOKENS, TOKENS};
use crate::engine::ran;

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

/// An engine without the backend does not go on as if nothing had been said.
fn stock_computes_nothing_from_references(mode: Mode) {
    require!(llama, cc);
    let conversation = Conversation::new(mode);
    let slot = conversation.model("mine").join("slots/chat.ref");
    let arguments = format!("--flash on --predict 2 --load {}", slot.display());
    let stock = ran(&conversation.gguf(), &arguments, None);
    assert!(!stock.logits.is_empty() && stock.logits.iter().all(|logit| logit.is_nan()));
}

/// A slot is what its sequence was when it was opened.
fn an_open_slot_stays_as_it_is(mode: Mode) {
    require!(llama, cc);
    let conversation = Conversation::new(mode);
    let sequence = conversation.model("mine").join("sequences/chat");
    let slot = conversation.model("mine").join("slots/chat.ref");
    let mut opened = File::open(&slot).unwrap();
    let before = std::fs::read(&slot).unwrap();
    assert_eq!(before.len() as u64, opened.metadata().unwrap().len());
    // The first rows of the first page, with the reference in them; the others are zeros.
    let first = usize::try_from(HEAD_BYTES).unwrap();
    let (filled, zeros) = before[first..][..128 * ROW_BYTES].split_at(2 * ROW_BYTES);
    assert!(
        filled.starts_with(b"kvfs reference 1") && filled[96..].iter().all(|byte| *byte == 0xff)
    );
    assert!(zeros.iter().all(|byte| *byte == 0));

    let append = |path: &str, bytes: &[u8]| {
        let mut file = File::options().append(true).open(sequence.join(path)).unwrap();
        file.write_all(bytes).unwrap();
    };
    for layer in 0..4 {
        append(&format!("{layer:03}/{REFERRED_TOKENS:07}.tail"), &[1; 2 * ROW_BYTES]);
    }
    append("tokens", &7_u32.to_le_bytes());
    assert_eq!(opened.metadata().unwrap().len(), before.len() as u64);
    let mut bytes = Vec::new();
    opened.read_to_end(&mut bytes).unwrap();
    assert!(bytes == before);
    let grown = std::fs::read(&slot).unwrap();
    assert_eq!(grown.len(), before.len() + 4 + 12 + 4 * 2 * ROW_BYTES);
    assert_eq!(slot.metadata().unwrap().len(), grown.len() as u64);
}

in_both_modes!(
    pages_are_mapped,
    stock_computes_nothing_from_references,
    an_open_slot_stays_as_it_is,
);

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
    let changed = |change: &dyn Fn(&File)| {
        std::fs::write(&copy, &bytes).unwrap();
        change(&File::options().write(true).open(&copy).unwrap());
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
