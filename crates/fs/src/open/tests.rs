//! What an open tells those who decide which copies stay.

use std::sync::Arc;

use super::*;
use crate::unmounted::Unmounted;
use kvfs_storage::tier::counters::Counters;
use kvfs_storage::tier::ram::RamTier;

/// A page of 16 tokens with its header.
const PAGE_BYTES: u64 = (128 << 10) + 4096;

#[test]
fn an_open_is_a_use_also_where_the_kernel_still_has_the_file() {
    let mut unmounted = Unmounted::new();
    let ram = Arc::new(RamTier::open(3 * PAGE_BYTES, Counters::default()).unwrap());
    unmounted.fs.core.store.ram = Some(Arc::clone(&ram));
    let (fs, model) = (
        &unmounted.fs,
        unmounted.make_model_of(1, |fields| {
            (fields.num_kv_heads, fields.head_dim) = (16, 128);
        }),
    );
    let sequence = model.make_sequence("s", &[0], 3);
    fs.commit().unwrap();
    let layer = unmounted.id_of(sequence, "000").unwrap();
    let pages = [0, 16, 32]
        .map(|start| unmounted.id_of(layer, &format!("{start:07}.safetensors")).unwrap());
    let holds = |page: InodeId| {
        let object = fs.core.state().inode(page).unwrap().file().unwrap().object.unwrap();
        ram.holds(object)
    };
    assert_eq!(pages.map(holds), [true; 3]);
    for page in [pages[2], pages[0], pages[1]] {
        let opened = fs.open_for(page, libc::O_RDONLY, Caller::DAEMON).unwrap();
        fs.release(opened.handle).unwrap();
    }
    // The page that was opened first is opened once more, last of all.
    let held = fs.open_held(pages[2]).unwrap().expect("it is the one that was opened");
    fs.release(held).unwrap();
    model.write_page(layer, 0, 48);
    assert!(holds(pages[2]), "it was used last");
    assert_eq!(pages.map(holds).iter().filter(|holds| **holds).count(), 2);
}
