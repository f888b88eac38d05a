//! Pages and states begin with a header of one length: inputs say what stands in it.

pub(crate) const HEADER_BYTES: usize = 4096;

/// The file with another header: the first bytes of the file if `is_raw`, else the JSON behind its length.
pub(crate) fn with_header(file: &[u8], is_raw: bool, input: &[u8]) -> Vec<u8> {
    let mut file = file.to_vec();
    let from = if is_raw { 0 } else { 8 };
    if !is_raw {
        file[from..HEADER_BYTES].fill(b' ');
    }
    let length = input.len().min(HEADER_BYTES - from);
    file[from..from + length].copy_from_slice(&input[..length]);
    file
}
