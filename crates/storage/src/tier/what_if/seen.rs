//! The uses that a mount has seen, as whoever asked for them reads them.

use std::collections::HashMap;

use super::record::{Happened, RECORD_BYTES, Record, is_sampled};

/// What the answer begins with; the number is that of its form.
pub(super) const FIRST_LINE: &str = "kvfs uses 1";
/// The lines before the records are shorter than that.
const HEAD_BYTES_MAX: usize = 4096;
/// Layers that a model may have.
const LAYERS_MAX: u32 = 4096;

/// Uses of a sample of the objects, in their order.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    /// One in so many objects is in the sample, as a power of two.
    pub sampling_bits: u32,
    /// Uses of all objects meanwhile.
    pub uses: u64,
    /// Bytes of the objects that were used, each time.
    pub used_bytes: u64,
    /// Since the first of them.
    pub seconds: u64,
    /// They are those since the mount began.
    pub is_whole: bool,
    pub(super) objects: Vec<Object>,
    pub(super) steps: Vec<Step>,
}

/// An object of the sample.
#[derive(Clone, Copy, Debug)]
pub(super) struct Object {
    pub(super) number: u64,
    /// The last length.
    pub(super) bytes: u64,
    /// Tokens of all layers together, divided by the layers.
    pub(super) tokens: f64,
}

/// Something that happened to one of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) object: u32,
    pub(super) what: Happened,
    pub(super) bytes: u64,
    /// How often.
    pub(super) times: u32,
}

impl Seen {
    /// Reads what a mount has answered. The error is one line.
    pub fn parse(answer: &[u8]) -> Result<Seen, String> {
        let head = &answer[..answer.len().min(HEAD_BYTES_MAX)];
        let end = head.windows(2).position(|two| two == b"\n\n");
        let end = end.ok_or("what it tells of its uses has no end of its head")?;
        let head = std::str::from_utf8(&head[..end]).map_err(|error| error.to_string())?;
        let mut lines = head.lines();
        let first = lines.next().unwrap_or_default();
        if first != FIRST_LINE {
            return Err(format!(
                "it tells its uses in another form, {first:?}: use its version of kvfs"
            ));
        }
        let (mut seen, mut layers) = (Seen::default(), Vec::new());
        for (key, value) in lines.filter_map(|line| line.split_once(": ")) {
            let number =
                || value.parse::<u64>().map_err(|_| format!("{key}: {value:?} is no number"));
            match key {
                "sampling_bits" => {
                    seen.sampling_bits = u32::try_from(number()?).unwrap_or(0).min(47);
                }
                "uses" => seen.uses = number()?,
                "used_bytes" => seen.used_bytes = number()?,
                "seconds" => seen.seconds = number()?,
                "is_whole" => seen.is_whole = value == "true",
                "layers" => {
                    layers = value.split(' ').filter_map(|text| text.parse().ok()).collect();
                }
                _ => {}
            }
        }
        seen.add_records(&answer[end + 2..], &layers);
        Ok(seen)
    }

    fn add_records(&mut self, records: &[u8], layers: &[u32]) {
        let mut known = HashMap::new();
        for record in records.as_chunks::<RECORD_BYTES>().0 {
            let record = Record::from_le_bytes(*record);
            // Objects that are being forgotten may be there still.
            let is_sampled = is_sampled(record.object(), self.sampling_bits);
            let Some(what) = record.what().filter(|_| is_sampled) else { continue };
            let next = u32::try_from(self.objects.len()).unwrap_or(u32::MAX);
            let object = *known.entry(record.object()).or_insert(next);
            if object == next {
                self.objects.push(Object { number: record.object(), bytes: 0, tokens: 0.0 });
            }
            let at = &mut self.objects[object as usize];
            let is_again = what == Happened::UsedAgain;
            if !is_again && what != Happened::Gone {
                at.bytes = record.bytes();
            }
            if let Some(layers) = layers.get(usize::from(record.model()).wrapping_sub(1)) {
                at.tokens = f64::from(record.tokens) / f64::from((*layers).clamp(1, LAYERS_MAX));
            }
            let (bytes, times) = (at.bytes, if is_again { record.tokens } else { 1 });
            self.steps.push(Step { object, what, bytes, times });
        }
    }

    /// Different objects of the sample.
    pub fn objects(&self) -> usize {
        self.objects.len()
    }

    /// Bytes of all objects that were used or made, as far as the sample tells.
    pub fn all_bytes(&self) -> u64 {
        let sampled: u64 =
            self.objects.iter().fold(0, |sum: u64, object| sum.saturating_add(object.bytes));
        sampled.saturating_mul(1 << self.sampling_bits)
    }
}
