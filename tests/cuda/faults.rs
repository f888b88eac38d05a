//! What is missing or fails is an error that says what to do, at once and never a wrong number.

use kvfs::attention::{Attention, Options, Queries, Shape};
use kvfs::cuda::{CudaAttention, CudaError, Settings};
use kvfs::page::Dtype;

use crate::fake::{F16_64, Plan, under, under_an_old_one, without};
use crate::fixture::{Memory, Order, Random};

const SETTINGS: Settings = Settings {
    slot_bytes: 16 << 10,
    copy_threads: 1,
    hot_bytes: 0,
    registered_bytes: 0,
    device: 0,
};

fn open() -> Result<CudaAttention, CudaError> {
    CudaAttention::new(Shape::new(2, 1, 64, 64).unwrap(), SETTINGS)
}

/// A decode step over 300 tokens, which go through six slots.
fn decode(cuda: &mut CudaAttention) -> Result<Vec<f32>, CudaError> {
    let mut random = Random(3);
    let shape = cuda.shape();
    let memory = Memory::new(shape, Dtype::F16, 300, Order::Hnd, &mut random);
    let (q, blocks) = (random.floats(128, 1.0), [memory.block(0)]);
    let queries = Queries { q: &q, positions: &[299] };
    let found = cuda.run(&queries, &blocks, &Options::default())?.finish(None)?;
    let expected = Attention::new(shape, 1)?.run(&queries, &blocks, &Options::default())?;
    let expected = expected.finish(None)?;
    let is_close = |(a, b): (&f32, &f32)| (a - b).abs() < 1e-5;
    assert!(found.iter().zip(&expected).all(is_close), "{found:?} {expected:?}");
    Ok(found)
}

#[test]
fn no_driver() {
    without(concat!(module_path!(), "::no_driver"), || match open() {
        Err(CudaError::Unavailable(why)) => assert!(why.contains("driver"), "{why}"),
        Err(other) => panic!("{other}"),
        Ok(cuda) => eprintln!("skipped: this machine has {}", cuda.properties().name),
    });
}

/// Set for the process with the driver: what its error must say.
const SAYS: &str = "KVFS_TEST_SAYS";

#[test]
fn no_device_that_will_do() {
    let plans: &[Plan<'_>] = &[
        &[("KVFS_FAKE_DEVICES", "0"), (SAYS, "the NVIDIA driver shows no GPU")],
        &[("KVFS_FAKE_FAIL", "cuInit:1:100"), (SAYS, "the NVIDIA driver shows no GPU")],
        &[("KVFS_FAKE_FAIL", "cuInit:1:999"), (SAYS, "cuInit: FAKE_999")],
        &[("KVFS_FAKE_VERSION", "8000"), (SAYS, "is of CUDA 8.0")],
        &[("KVFS_FAKE_CAPABILITY", "50"), (SAYS, "has compute capability 5.0")],
    ];
    under(concat!(module_path!(), "::no_device_that_will_do"), &[F16_64], plans, || {
        let says = std::env::var(SAYS).unwrap();
        match open() {
            Err(CudaError::Unavailable(why)) => assert!(why.contains(&says), "{why}"),
            other => panic!("{other:?}"),
        }
    });
}

/// The binding would panic at the first call of the function.
#[test]
fn a_driver_that_lacks_a_function() {
    under_an_old_one(concat!(module_path!(), "::a_driver_that_lacks_a_function"), || {
        let Err(CudaError::Unavailable(why)) = open() else { panic!("it was taken") };
        assert_eq!(why, "the NVIDIA driver is too old: it has no cuMemHostUnregister");
    });
}

#[test]
fn no_shared_memory() {
    let plans: &[Plan<'_>] = &[&[("KVFS_FAKE_SHARED", "50000")]];
    under(concat!(module_path!(), "::no_shared_memory"), &[F16_64], plans, || {
        assert!(matches!(open(), Err(CudaError::Unsupported(_))));
    });
}

/// Every allocation in turn: the error names it, and the next try succeeds.
#[test]
fn out_of_memory() {
    let calls = ["cuMemAlloc", "cuMemHostAlloc"];
    let numbers = (1..=14).flat_map(|n| calls.map(|call| format!("{call}:{n}:2")));
    let failures: Vec<String> = numbers.collect();
    let plans: Vec<[(&str, &str); 1]> =
        failures.iter().map(|failure| [("KVFS_FAKE_FAIL", failure.as_str())]).collect();
    let plans: Vec<Plan<'_>> = plans.iter().map(|plan| &plan[..]).collect();
    under(concat!(module_path!(), "::out_of_memory"), &[F16_64], &plans, || {
        let mut failures = 0;
        for _ in 0..2 {
            match open().and_then(|mut cuda| decode(&mut cuda)) {
                Ok(_) => {}
                Err(CudaError::OutOfMemory { .. }) => failures += 1,
                Err(other) => panic!("{other}"),
            }
        }
        assert_eq!(failures, 1);
    });
}

/// Calls that fail, and kernels that fail when they run: whatever comes of it is an error of the
/// device, and nothing hangs.
#[test]
fn a_lost_device() {
    let failures = [
        "cuLaunchKernel:1:719",
        "cuLaunchKernel:4:719",
        "cuMemcpyHtoDAsync:2:700",
        "cuMemcpyDtoHAsync:1:700",
        "cuEventRecord:3:700",
        "cuStreamWaitEvent:2:700",
        "cuModuleLoadData:1:222",
        "kernel:1:719",
        "kernel:3:719",
    ];
    let plans: Vec<[(&str, &str); 1]> =
        failures.iter().map(|failure| [("KVFS_FAKE_FAIL", *failure)]).collect();
    let plans: Vec<Plan<'_>> = plans.iter().map(|plan| &plan[..]).collect();
    under(concat!(module_path!(), "::a_lost_device"), &[F16_64], &plans, || {
        let outcome = open().and_then(|mut cuda| decode(&mut cuda));
        assert!(matches!(outcome, Err(CudaError::Device { .. })), "{outcome:?}");
    });
}

#[test]
fn what_the_kernels_do_not_know() {
    under(concat!(module_path!(), "::what_the_kernels_do_not_know"), &[F16_64], &[&[]], || {
        let mut cuda = open().unwrap();
        let mut run = |options: &Options<'_>, q: &[f32]| {
            let queries = Queries { q, positions: &[0] };
            cuda.run(&queries, &[], options).map(|_| ())
        };
        let (q, slopes) = ([0.0; 128], [1.0, 1.0]);
        let alibi = Options { alibi_slopes: Some(&slopes), ..Options::default() };
        assert!(matches!(run(&alibi, &q), Err(CudaError::Unsupported(_))));
        let both = Options { causal: false, window: Some(1), ..Options::default() };
        assert!(matches!(run(&both, &q), Err(CudaError::Unsupported(_))));
        let wrong = Options { soft_cap: Some(-1.0), ..Options::default() };
        assert!(matches!(run(&wrong, &q), Err(CudaError::Attention(_))));
        let plain = Options::default();
        assert!(matches!(run(&plain, &q[1..]), Err(CudaError::Attention(_))));
        run(&plain, &q).unwrap();
        let wide = Shape::new(16, 1, 576, 512).unwrap();
        assert!(matches!(CudaAttention::new(wide, SETTINGS), Err(CudaError::Unsupported(_))));
    });
}
