//! What the tests would say if the program forgot to wait, to ask for all of its bytes and blocks, or
//! reckoned wrongly: otherwise they would prove nothing. The driver does it in the program's stead, so
//! it is the program as it is that runs.

use kvfs::attention::{Options, Queries, Shape};
use kvfs::cuda::{CudaAttention, Settings};
use kvfs::page::Dtype;

use crate::fake::{F16_64, Plan, noticed};
use crate::fixture::{Memory, Order, Random, assert_close, reference};

const SLOW_COPY: (&str, &str) = ("KVFS_FAKE_COPY_US_LEAST", "4000");
const SLOW_KERNEL: (&str, &str) = ("KVFS_FAKE_KERNEL_US_LEAST", "4000");

fn forgets(what: &'static str) -> (&'static str, &'static str) {
    ("KVFS_FAKE_IGNORE", what)
}

fn reckons(what: &'static str) -> (&'static str, &'static str) {
    ("KVFS_FAKE_WRONG", what)
}

#[test]
fn every_bug_is_noticed() {
    const NONE: (&str, &str) = ("KVFS_FAKE_SEED", "2");
    let bugs: [([(&str, &str); 2], &str); 12] = [
        // A kernel does not wait for its slot to be filled.
        ([forgets("computes"), SLOW_COPY], "off by"),
        // A slot is filled again while a kernel reads it.
        ([forgets("copies"), SLOW_KERNEL], "off by"),
        // A buffer is filled again before its upload is done, and a result read before it is there.
        ([forgets("host"), SLOW_COPY], "off by"),
        // The last rows of a page are left out.
        ([forgets("end"), SLOW_COPY], "off by"),
        // So are the last tokens of a slot.
        ([forgets("split"), SLOW_COPY], "off by"),
        // A short page's number of tokens, the distance of its tokens, the scale of the logits.
        ([reckons("tokens"), NONE], "off by"),
        ([reckons("stride"), NONE], "off by"),
        ([reckons("scale"), NONE], "off by"),
        // How many parts merge, and what their weights are.
        ([reckons("parts"), NONE], "off by"),
        ([reckons("weights"), NONE], "off by"),
        // Which slot comes next, and whose queries a head's are.
        ([reckons("slot"), NONE], "off by"),
        ([reckons("head"), NONE], "off by"),
    ];
    let bugs: Vec<(Plan<'_>, &str)> = bugs.iter().map(|(plan, says)| (&plan[..], *says)).collect();
    noticed(concat!(module_path!(), "::every_bug_is_noticed"), &[F16_64], &bugs, || {
        let shape = Shape::new(2, 1, 64, 64).unwrap();
        let settings = Settings {
            slot_bytes: 40 << 10,
            copy_threads: 1,
            hot_bytes: 0,
            registered_bytes: 0,
            device: 0,
        };
        let mut cuda = CudaAttention::new(shape, settings).unwrap();
        let mut random = Random(5);
        // A slot takes one of them, so each slot is used three times.
        let memory: Vec<Memory> =
            (0..12).map(|_| Memory::new(shape, Dtype::F16, 140, Order::Hnd, &mut random)).collect();
        let blocks: Vec<_> =
            memory.iter().zip(0..).map(|(memory, index)| memory.block(index * 140)).collect();
        let q = random.floats(128, 2.0);
        let queries = Queries { q: &q, positions: &[12 * 140 - 1] };
        let options = Options { sm_scale: Some(0.2), ..Options::default() };
        let expected = reference(shape, &queries, &blocks, &options);
        for _ in 0..2 {
            let partials = cuda.run(&queries, &blocks, &options).unwrap();
            assert_close(&partials.finish(None).unwrap(), &expected, "a decode step");
        }
    });
}
