//! What an open tells those who decide which copies stay.

use std::sync::Arc;

use super::*;
use crate::unmounted::{Unmounted, place};
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::ram::RamTier;

/// A page of 16 tokens with its header.
const PAGE_BYTES: u64 = (128 << 10) + 4096;

#[test]
fn an_open_is_a_use_also_where_the_kernel_still_has_the_file() {
    let mut unmounted = Unmounted::new();
    let ram = Arc::new(RamTier::open(4 * PAGE_BYTES, Counters::default()).unwrap());
    unmounted.fs.core.store.ram = Some(Arc::clone(&ram));
    let (fs, model) = (
        &unmounted.fs,
        unmounted.make_model_of(1, |fields| {
            (fields.num_kv_heads, fields.head_dim) = (16, 128);
        }),
    );
    let sequence = model.make_sequence("s", &[0], 4);
    fs.commit().unwrap();
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let pages = [0, 16, 32, 48]
        .map(|start| unmounted.id_of(layer, &format!("{start:07}.safetensors")).unwrap());
    let holds = |page: InodeId| {
        let object = fs.core.state().inode(page).unwrap().file().unwrap().object.unwrap();
        ram.holds(object)
    };
    assert_eq!(pages.map(holds), [true; 4]);
    // The kernel holds it, and with it what is known of its bytes.
    fs.lookup_for(&place(layer, "0000016.safetensors"), Caller::DAEMON).unwrap();
    // None of them after the same one as before, or it would be taken for the end of what begins with that.
    for page in [pages[1], pages[3], pages[0], pages[2]] {
        let opened = fs.open_for(page, libc::O_RDONLY, Caller::DAEMON).unwrap();
        fs.release(opened.handle).unwrap();
    }
    // The page that was opened first is opened once more, last of all.
    let held = fs.open_held(pages[1]).unwrap().expect("it is the one that was opened");
    fs.release(held).unwrap();
    model.write_page(layer, 0, 64);
    assert!(holds(pages[1]), "it was used last");
    assert_eq!(pages.map(holds).iter().filter(|holds| **holds).count(), 3);
}
