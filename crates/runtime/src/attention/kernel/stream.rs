//! Reading memory and nothing else: what attention is measured against.

#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::{
    _mm512_add_epi64, _mm512_loadu_si512, _mm512_reduce_add_epi64, _mm512_setzero_si512,
};

/// The sum of all 8-byte words. The processor's own prefetching is the fastest here; software
/// prefetch at 0.5 to 16 KiB makes it no faster.
pub(in crate::attention) fn sum_words(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        return unsafe { sum_words_avx512(bytes) };
    }
    let words = bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word));
    words.fold(0, u64::wrapping_add)
}

/// Eight cache lines at a time, in as many sums.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn sum_words_avx512(bytes: &[u8]) -> u64 {
    let mut sums = [_mm512_setzero_si512(); 8];
    for lines in bytes.as_chunks::<512>().0 {
        for (sum, line) in sums.iter_mut().zip(lines.as_chunks::<64>().0) {
            // SAFETY: a line holds a vector; any alignment will do.
            let words = unsafe { _mm512_loadu_si512(line.as_ptr().cast()) };
            *sum = _mm512_add_epi64(*sum, words);
        }
    }
    let sum = |sums| _mm512_reduce_add_epi64(sums).cast_unsigned();
    sums.into_iter().map(sum).fold(0, u64::wrapping_add)
}
