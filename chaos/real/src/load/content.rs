//! Blocks that say what they are: any reader can tell whether the bytes are a complete write of the key it asked for.
//!
//! A block is `key: u64, version: u64` (little-endian) and then words that follow from both; its length follows from the
//! key. So a wrong, mixed, cut or shifted body is noticed without asking who wrote it.

use crate::dice::mix;

const HEAD: usize = 16;

/// Bytes of the blocks of a key: 4 KiB to 1 MiB, most of them small.
#[must_use]
pub fn length(key: u64) -> usize {
    let odd = usize::try_from(mix(key) % 64).unwrap_or(0) * 8;
    match mix(key ^ 0xb10c) % 8 {
        0..=4 => 4096 + odd,
        5 | 6 => (128 << 10) + odd,
        _ => 1 << 20,
    }
}

/// The bytes of one version of a block.
#[must_use]
pub fn fill(key: u64, version: u64) -> Vec<u8> {
    let length = length(key);
    let mut out = Vec::with_capacity(length + 8);
    out.extend_from_slice(&key.to_le_bytes());
    out.extend_from_slice(&version.to_le_bytes());
    let seed = mix(key ^ mix(version));
    let mut n = 0_u64;
    while out.len() < length {
        out.extend_from_slice(&word(seed, n).to_le_bytes());
        n += 1;
    }
    out.truncate(length);
    out
}

fn word(seed: u64, n: u64) -> u64 {
    seed.wrapping_add(n).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23) ^ n
}

/// The version of a block that was read under `key`.
///
/// # Errors
/// Says what is wrong with the bytes.
pub fn check(key: u64, body: &[u8]) -> Result<u64, String> {
    let number = |at: usize| {
        body.get(at..at + 8)
            .and_then(|b| b.try_into().ok())
            .map(u64::from_le_bytes)
    };
    let (Some(found), Some(version)) = (number(0), number(8)) else {
        return Err(format!("a body of {} bytes", body.len()));
    };
    if found != key {
        return Err(format!("the bytes of key {found:#x}"));
    }
    if body.len() != length(key) {
        return Err(format!("{} bytes instead of {}", body.len(), length(key)));
    }
    let seed = mix(key ^ mix(version));
    for (n, piece) in body.get(HEAD..).unwrap_or_default().chunks(8).enumerate() {
        let right = word(seed, n as u64).to_le_bytes();
        if *piece != right[..piece.len()] {
            return Err(format!("version {version} with other bytes at {}", HEAD + n * 8));
        }
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_change_of_a_block_is_noticed() {
        for key in 0..40 {
            let body = fill(key, key * 3);
            assert_eq!(check(key, &body), Ok(key * 3));
            assert!(check(key + 1, &body).is_err());
            assert!(check(key, &body[..body.len() - 1]).is_err());
            assert!(check(key, &[]).is_err());
            for at in [0, 8, 16, body.len() / 2, body.len() - 1] {
                let mut bad = body.clone();
                bad[at] ^= 1;
                assert!(check(key, &bad).is_err(), "key {key}, byte {at}");
            }
            // Half of another version.
            let mut mixed = body.clone();
            let half = body.len() / 2;
            mixed[half..].copy_from_slice(&fill(key, key * 3 + 1)[half..]);
            assert!(check(key, &mixed).is_err());
        }
    }
}
