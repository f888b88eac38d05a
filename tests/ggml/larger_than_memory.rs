//! A KV cache four times as large as what the engine may have of memory.

use std::os::unix::process::ExitStatusExt;

use crate::common::memory_group::MemoryGroup;
use crate::common::mount::scratch_directory;
use crate::common::{Mode, Mount};
use crate::engine::{command, ran};
use crate::gguf::Model;
use crate::slot_file;

const MEMORY_BYTES: u64 = 96 << 20;
/// With 32 KiB for each token this is four times the memory.
const TOKENS: usize = 12288;
/// Of the spread of the logits. Merging in another order rounds otherwise, and the engine rounds what
/// it gets to f16.
const TOLERANCE: f32 = 4e-3;

#[test]
fn a_cache_of_four_times_the_memory() {
    require!(fuse, root, cgroup, llama, cc);
    let directory = scratch_directory();
    let path = directory.path().join("model.gguf");
    let model = Model { heads: 8, kv_heads: 8, head_dim: 256, ..Model::tiny() };
    model.write_random(7, &path);
    let slot = directory.path().join("slot");
    slot_file::write(&slot, &model, TOKENS);
    let arguments =
        format!("--flash on --context {} --predict 6 --load {}", TOKENS + 256, slot.display());
    let mount = Mount::new(Mode::Passthrough);
    let expected = ran(&path, &arguments, Some(mount.path()));
    expected.assert_attention_was_ours();

    let group = MemoryGroup::new(MEMORY_BYTES).unwrap();
    let ours = expected.followed_in(Some(&group), &path, &arguments, Some(mount.path()));
    ours.assert_attention_was_ours();
    ours.assert_like(&expected, TOLERANCE);
    assert!(ours.read_ahead > expected.read_ahead, "nothing left memory");

    let stock = group.bound(&command(&path, &arguments, None)).output().unwrap();
    assert_eq!(stock.status.signal(), Some(libc::SIGKILL), "stock fits into the memory");
}
