//! Changes bytes into other bytes that are likely to matter.

use std::ops::Range;

use crate::common::random::Random;

/// Numbers at the borders of what fits, is allowed, or is aligned.
const NUMBERS: [u64; 20] = [
    0,
    1,
    2,
    7,
    31,
    32,
    33,
    127,
    128,
    255,
    256,
    4088,
    4095,
    4096,
    4097,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_ffff,
    1 << 40,
    u64::MAX,
];
/// Changes to one input at most, before it is run.
const CHANGES_MAX: usize = 6;
/// Bytes inserted, removed or copied at once.
const RUN_MAX: usize = 48;

/// Changes `input`, now and then with parts of `other` or of `words`.
pub(crate) fn mutate(input: &mut Vec<u8>, other: &[u8], words: &[&[u8]], random: &mut Random) {
    for _ in 0..=random.below(CHANGES_MAX) {
        change(input, other, words, random);
    }
}

fn change(input: &mut Vec<u8>, other: &[u8], words: &[&[u8]], random: &mut Random) {
    let at = random.below(input.len());
    match random.below(13) {
        0 | 1 => with_byte(input, at, |byte| byte ^ (1 << random.below(8))),
        2 => with_byte(input, at, |_| random.next().to_le_bytes()[0]),
        3 => write_number(input, at, *random.pick(&NUMBERS), random),
        4 => add(input, at, random),
        5 => insert(input, at, &random_bytes(random)),
        6 => drop(input.drain(run(input.len(), random))),
        7 => {
            let copied = input[run(input.len(), random)].to_vec();
            insert(input, at, &copied);
        }
        8 => overwrite(input, at, &other[run(other.len(), random)]),
        9 => {
            // The beginning of one and the end of the other.
            let from = random.below(other.len() + 1);
            input.truncate(at);
            input.extend_from_slice(&other[from..]);
        }
        10 if !words.is_empty() => insert(input, at, random.pick::<&[u8]>(words)),
        11 if !words.is_empty() => overwrite(input, at, random.pick::<&[u8]>(words)),
        12 => write_digits(input, random),
        _ => input.truncate(at),
    }
}

fn with_byte(input: &mut [u8], at: usize, change: impl FnOnce(u8) -> u8) {
    if let Some(byte) = input.get_mut(at) {
        *byte = change(*byte);
    }
}

fn random_bytes(random: &mut Random) -> Vec<u8> {
    let length = random.below(16) + 1;
    random.bytes(length)
}

fn run(length: usize, random: &mut Random) -> Range<usize> {
    let start = random.below(length);
    start..length.min(start + random.below(RUN_MAX))
}

fn insert(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    input.splice(at..at, bytes.iter().copied());
}

fn overwrite(input: &mut Vec<u8>, at: usize, bytes: &[u8]) {
    let end = input.len().min(at + bytes.len());
    input.splice(at..end, bytes.iter().copied());
}

/// A number of one, two, four or eight bytes.
fn write_number(input: &mut [u8], at: usize, number: u64, random: &mut Random) {
    let width = 1 << random.below(4);
    let end = input.len().min(at + width);
    let bytes = if random.is_true() { number.to_le_bytes() } else { number.to_be_bytes() };
    let from = if random.is_true() { 0 } else { 8 - width };
    for (byte, new) in input[at..end].iter_mut().zip(&bytes[from..]) {
        *byte = *new;
    }
}

fn add(input: &mut [u8], at: usize, random: &mut Random) {
    let difference = random.next().to_le_bytes()[0] % 16;
    let rises = random.is_true();
    with_byte(input, at, |byte| {
        if rises { byte.wrapping_add(difference) } else { byte.wrapping_sub(difference) }
    });
}

/// Another number where one stands as text.
fn write_digits(input: &mut Vec<u8>, random: &mut Random) {
    let digits: Vec<usize> = (0..input.len()).filter(|at| input[*at].is_ascii_digit()).collect();
    if digits.is_empty() {
        return;
    }
    let start = *random.pick(&digits);
    let rest = input[start..].iter().position(|byte| !byte.is_ascii_digit());
    let end = rest.map_or(input.len(), |length| start + length);
    let number = random.pick(&NUMBERS).to_string();
    input.splice(start..end, number.into_bytes());
}
