//! Numbers as header values.

use std::time::Duration;

use http::HeaderValue;

/// Smaller numbers have a static text: most limits, remaining units, and seconds up to two hours.
const STATIC_TEXTS: usize = 10_000;

/// All smaller numbers, each with four digits.
static DIGITS: [[u8; 4]; STATIC_TEXTS] = {
    let mut digits = [[0; 4]; STATIC_TEXTS];
    let mut number = 0;
    while number < STATIC_TEXTS {
        let (mut place, mut rest) = (4, number);
        while place > 0 {
            place -= 1;
            digits[number][place] = b'0' + (rest % 10) as u8;
            rest /= 10;
        }
        number += 1;
    }
    digits
};

/// Evaluated by the compiler, so that the panic is an error at compile time.
static TEXT: &str = match str::from_utf8(DIGITS.as_flattened()) {
    Ok(text) => text,
    Err(_) => panic!("digits are ASCII"),
};

pub(super) fn seconds_rounded_up(duration: Duration) -> u64 {
    // Saturating, since a store may return the longest duration for "never".
    duration.as_secs().saturating_add(u64::from(duration.subsec_nanos() > 0))
}

/// As `HeaderValue::from`, which needs two allocations. A number with a static text needs none, any other number one.
#[inline]
pub(super) fn header_value(number: u64) -> HeaderValue {
    static_text(number).map_or_else(|| long_header_value(number), HeaderValue::from_static)
}

fn long_header_value(number: u64) -> HeaderValue {
    let (mut digits, mut begin, mut rest) = ([b'0'; 20], 20, number);
    while rest > 0 {
        begin -= 4;
        digits[begin..begin + 4].copy_from_slice(&DIGITS[(rest % STATIC_TEXTS as u64) as usize]);
        rest /= STATIC_TEXTS as u64;
    }
    let zeros = digits[begin..].iter().take_while(|digit| **digit == b'0').count();
    HeaderValue::from_bytes(&digits[begin + zeros..]).unwrap_or_else(|_| HeaderValue::from(number))
}

fn static_text(number: u64) -> Option<&'static str> {
    let start = 4 * usize::try_from(number).ok().filter(|index| *index < STATIC_TEXTS)?;
    let zeros = [1_000, 100, 10].into_iter().filter(|power| number < *power).count();
    Some(&TEXT[start + zeros..start + 4])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_is_written_as_it_always_is() {
        let edges = [u64::from(u32::MAX), u64::MAX / 4, u64::MAX / 4 + 1, u64::MAX - 1, u64::MAX];
        let lengths = (0..20).map(|digits| 10_u64.pow(digits)).flat_map(|power| [power - 1, power, power + 1]);
        for number in (0..=10_001).chain(edges).chain(lengths) {
            assert_eq!(header_value(number), HeaderValue::from(number));
        }
    }
}
