//! What a program in C cannot provoke: the rest is tested by programs in C.

mod numbers;
mod pages;
mod side;

use std::ffi::CStr;
use std::ptr;

use super::memory::{Caller, Structure};
use super::status::{Failure, Status, guard, kvfs_last_error};
use super::{AttentionConfig, Block, Geometry, Layer, Options, Partials, Queries, Tensor};

fn last_error() -> String {
    // SAFETY: the text of this thread, which nobody replaces meanwhile.
    unsafe { CStr::from_ptr(kvfs_last_error()) }.to_str().unwrap().to_owned()
}

#[test]
fn a_panic_is_a_status() {
    // SAFETY: it touches nothing.
    let status = unsafe { guard(|_: &Caller| panic!("on \0 purpose")) };
    assert_eq!(status, Status::Internal);
    assert_eq!(last_error(), "a defect of kvfs, please report it: on \\0 purpose");
    let other_thread = std::thread::scope(|scope| scope.spawn(last_error).join().unwrap());
    assert_eq!(other_thread, "");
    // SAFETY: it touches nothing.
    assert_eq!(unsafe { guard(|_: &Caller| Ok(())) }, Status::Ok);
    assert!(last_error().starts_with("a defect"), "success leaves the last error alone");
}

/// Sizes that programs were compiled with: they may grow, and nothing else.
#[test]
fn sizes_of_structures() {
    fn check<T: Structure>(expected: usize, required: usize) {
        assert_eq!((size_of::<T>(), T::REQUIRED_BYTES), (expected, required), "{}", T::NAME);
        assert_eq!(align_of::<T>(), align_of::<usize>(), "{}", T::NAME);
    }
    if size_of::<usize>() == 8 {
        check::<AttentionConfig>(32, 24);
        check::<Queries>(40, 40);
        check::<Block>(104, 88);
        check::<Options>(88, 8);
        check::<Partials>(64, 48);
        check::<Geometry>(56, 8);
        check::<Layer>(40, 8);
    }
}

/// A structure that grew by `second`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
struct Sample {
    size: usize,
    first: u64,
    second: u64,
}

// SAFETY: numbers without gaps.
unsafe impl Structure for Sample {
    const NAME: &'static str = "sample";
    const REQUIRED_BYTES: usize = std::mem::offset_of!(Sample, second);
}

/// A caller whose structures are the words of a slice.
fn caller() -> Caller {
    // SAFETY: the tests give pointers to slices that are as long as they say.
    unsafe { Caller::new() }
}

#[cfg(target_pointer_width = "64")]
#[test]
fn structures_of_other_versions() {
    fn check(words: &[u64], expected: Result<Sample, &str>) {
        let found = caller().read(words.as_ptr().cast::<Sample>());
        match expected {
            Ok(sample) => assert_eq!(found, Ok(sample)),
            Err(text) => assert!(found.is_err_and(|failure| failure.text().contains(text))),
        }
    }
    check(&[24, 5, 6], Ok(Sample { size: 24, first: 5, second: 6 }));
    check(&[16, 5, 99], Ok(Sample { size: 16, first: 5, second: 0 }));
    check(&[16, 5], Ok(Sample { size: 16, first: 5, second: 0 }));
    check(&[40, 5, 6, 0, 0], Ok(Sample { size: 40, first: 5, second: 6 }));
    check(&[40, 5, 6, 0, 1], Err("sample has 40 bytes, this version knows 24: zero the others"));
    check(&[8, 5, 6], Err("sample.size is 8: set it to sizeof(sample), here 24"));
    check(&[20, 5, 6], Err("sample.size is 20"));
    check(&[0, 5, 6], Err("sample.size is 0"));
    check(&[u64::MAX, 5, 6], Err("sample.size is 18446744073709551615"));
    assert!(caller().read(std::ptr::null::<Sample>()).is_err());
}

#[cfg(target_pointer_width = "64")]
#[test]
fn arrays_of_other_versions() {
    let words: [u64; 8] = [32, 5, 6, 0, 32, 7, 8, 0];
    let found = caller().read_all(words.as_ptr().cast::<Sample>(), 2).unwrap();
    assert_eq!(found[0], Sample { size: 32, first: 5, second: 6 });
    assert_eq!(found[1], Sample { size: 32, first: 7, second: 8 });
    let words: [u64; 4] = [16, 5, 16, 7];
    let found = caller().read_all(words.as_ptr().cast::<Sample>(), 2).unwrap();
    assert_eq!(found[1], Sample { size: 16, first: 7, second: 0 });
    let words: [u64; 6] = [24, 5, 6, 16, 7, 8];
    let found = caller().read_all(words.as_ptr().cast::<Sample>(), 2);
    assert_eq!(found.unwrap_err().text(), "sample 1 has size 16, the first one 24");
}

#[cfg(target_pointer_width = "64")]
#[test]
fn results_for_other_versions() {
    fn check(size: u64, expected: &[u64]) {
        let mut words = [99; 6];
        words[0] = size;
        let sample = Sample { size: 24, first: 5, second: 6 };
        caller().write(sample, words.as_mut_ptr().cast::<Sample>()).unwrap();
        assert_eq!(words, expected);
    }
    check(16, &[16, 5, 99, 99, 99, 99]);
    check(24, &[24, 5, 6, 99, 99, 99]);
    check(40, &[40, 5, 6, 0, 0, 99]);
}

#[test]
fn slices() {
    let values = [1.0_f32, 2.0];
    let caller = caller();
    assert_eq!(caller.slice(values.as_ptr(), 2, "values").unwrap(), values);
    assert_eq!(caller.slice(std::ptr::null::<f32>(), 0, "values").unwrap(), [0.0; 0]);
    let refused = |pointer: *const f32, count: usize, expected: &str| {
        let failure = caller.slice(pointer, count, "values").unwrap_err();
        assert!(failure.text().contains(expected), "{failure:?}");
    };
    refused(std::ptr::null(), 1, "values is NULL");
    refused(values.as_ptr().wrapping_byte_add(1), 1, "aligned to 4 bytes");
    refused(values.as_ptr(), usize::MAX, "larger than memory");
    refused(values.as_ptr(), usize::MAX / 8 + 1, "larger than memory");
    refused(std::ptr::without_provenance(usize::MAX - 3), 2, "larger than memory");
}

#[test]
fn handles() {
    let caller = caller();
    let mut handle: *mut String = std::ptr::null_mut();
    caller.create(&raw mut handle, || Ok("text".to_owned())).unwrap();
    assert_eq!(caller.handle(handle, "text").unwrap(), "text");
    assert_eq!(*caller.take(handle).unwrap().unwrap(), "text");
    let failed = caller.create(&raw mut handle, || Err(Failure::argument("no")));
    assert!(failed.is_err() && handle.is_null());
    assert!(caller.take(handle).unwrap().is_none() && caller.handle(handle, "text").is_err());
}

#[test]
fn failures_name_their_block() {
    assert_eq!(Failure::block(3, "no"), Failure::argument("no").of_block(3));
}

/// A block to be filled.
fn empty_block() -> Block {
    let nothing = Tensor { data: ptr::null(), bytes: 0, head_stride: 0, token_stride: 0 };
    Block {
        size: size_of::<Block>(),
        dtype: 0,
        values: 0,
        tokens: 0,
        k: nothing,
        v: nothing,
        first_position: 0,
        shift: 0,
    }
}
