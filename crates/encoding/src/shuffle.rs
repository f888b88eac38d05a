//! Bytes of equal significance side by side, so that zstd sees the exponents of floats apart from
//! their mantissas (the *shuffle* filter of HDF5 and Blosc).
//!
//! `n` elements of `N` bytes become `N` planes of `n` bytes: byte `b` of element `i` goes to
//! `b * n + i`. Bytes behind the last whole element keep their place. The loops are written so
//! that the compiler turns them into vector instructions.

/// Shuffles `bytes`, elements of `element_bytes` (2 or 4), into `out` of the same length.
pub(super) fn shuffle(element_bytes: usize, bytes: &[u8], out: &mut [u8]) {
    match element_bytes {
        2 => {
            let (elements, rest) = bytes.as_chunks::<2>();
            let (low, out) = out.split_at_mut(elements.len());
            let (high, out) = out.split_at_mut(elements.len());
            for ((element, low), high) in elements.iter().zip(low).zip(high) {
                [*low, *high] = *element;
            }
            out.copy_from_slice(rest);
        }
        4 => {
            let (elements, rest) = bytes.as_chunks::<4>();
            let (planes, out) = out.split_at_mut(4 * elements.len());
            for (byte, plane) in planes.chunks_exact_mut(elements.len().max(1)).enumerate() {
                for (element, out) in elements.iter().zip(plane) {
                    *out = element[byte];
                }
            }
            out.copy_from_slice(rest);
        }
        _ => unreachable!("elements are 2 or 4 bytes"),
    }
}

/// The inverse of [`shuffle`].
pub(super) fn unshuffle(element_bytes: usize, shuffled: &[u8], out: &mut [u8]) {
    let count = shuffled.len() / element_bytes;
    match element_bytes {
        2 => {
            let (elements, out_rest) = out.as_chunks_mut::<2>();
            let (low, rest) = shuffled.split_at(count);
            let (high, rest) = rest.split_at(count);
            for ((element, low), high) in elements.iter_mut().zip(low).zip(high) {
                *element = [*low, *high];
            }
            out_rest.copy_from_slice(rest);
        }
        4 => {
            let (elements, out_rest) = out.as_chunks_mut::<4>();
            let (first, rest) = shuffled.split_at(count);
            let (second, rest) = rest.split_at(count);
            let (third, rest) = rest.split_at(count);
            let (fourth, rest) = rest.split_at(count);
            let low = first.iter().zip(second);
            let high = third.iter().zip(fourth);
            for ((element, (a, b)), (c, d)) in elements.iter_mut().zip(low).zip(high) {
                *element = [*a, *b, *c, *d];
            }
            out_rest.copy_from_slice(rest);
        }
        _ => unreachable!("elements are 2 or 4 bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_as_the_definition() {
        fn check(element_bytes: usize, length: usize) {
            let bytes: Vec<u8> = (0..length).map(|i| (i * 37 % 251).to_le_bytes()[0]).collect();
            let count = length / element_bytes;
            let mut expected = bytes.clone();
            for (i, element) in bytes.chunks_exact(element_bytes).enumerate() {
                for (b, byte) in element.iter().enumerate() {
                    expected[b * count + i] = *byte;
                }
            }
            let mut shuffled = vec![0; length];
            shuffle(element_bytes, &bytes, &mut shuffled);
            assert_eq!(shuffled, expected, "{element_bytes} {length}");
            let mut back = vec![0; length];
            unshuffle(element_bytes, &shuffled, &mut back);
            assert_eq!(back, bytes, "{element_bytes} {length}");
        }
        for length in (0..70).chain([4095, 4096, 4099]) {
            check(2, length);
            check(4, length);
        }
    }
}
