import MLX
import Testing

@testable import MLXH2O

/// Rows packed from each group's least to its greatest element.
@Suite struct PackingTests {
    static let bits = [2, 3, 4, 5, 6, 8]

    /// Rows `[3, 20, 64]`, some groups of which lie off to one side.
    private func rows(_ dtype: DType) -> MLXArray {
        let numbers = GoldenCase(group: "", name: "", parameters: .object(["seed": .int(5)]))
        let away = MLXArray([0, 100, -7] as [Float]).reshaped([3, 1, 1])
        return (numbers.tensor(.k, [3, 20, 64]) + away).asType(dtype)
    }

    @Test(arguments: [DType.float32, .float16, .bfloat16])
    func noElementIsFurtherThanHalfAStep(dtype: DType) throws {
        let rows = rows(dtype)
        // Of scale and bias; levels count from what they were rounded to.
        let rounding: Float = dtype == .float32 ? 1e-6 : dtype == .float16 ? 1e-3 : 8e-3
        for bits in Self.bits {
            let packed = try PackedRows(packing: rows, bits: bits, groupSize: 32)
            #expect(packed.scales.dtype == dtype && packed.shape == [3, 20, 64])
            let apart = abs(packed.dequantizedRows - rows.float32).reshaped([3, 20, 2, 32])
            // The greatest element is `top` steps away, each of them rounded.
            let top = Float((1 << bits) - 1), steps = packed.scales.float32
            let most = steps * (0.5 + top * rounding) + abs(packed.biases.float32) * rounding
            #expect((apart .<= (most * 1.001 + 1e-5).column).all().item(Bool.self), "\(bits)")
        }
    }

    /// Phi-3's heads have 96 channels, StableLM's 80.
    @Test func groupsDivideTheWidthsOfAModelsRows() throws {
        func rows(_ key: Int, _ value: Int) -> [RowWidths] {
            [RowWidths(key: key, value: value, keySize: 2, valueSize: 2)]
        }
        let four = try H2OPacking(keyBits: 4, valueBits: 4)
        #expect(four.fitting(rows(64, 128)) == nil)
        #expect(four.fitting(rows(96, 96))?.groupSize == 32)
        #expect(four.fitting(rows(96, 96))?.keyBits == 4)
        #expect(four.fitting(rows(80, 80)) == nil && !four.fits(rows(80, 80)))
        let values = try H2OPacking(valueBits: 4)
        #expect(values.fitting(rows(80, 64)) == nil && values.fits(rows(80, 64)))
        let wide = try H2OPacking(keyBits: 4, valueBits: 4, groupSize: 128)
        #expect(wide.fitting(rows(96, 96)) == nil && !wide.fits(rows(96, 96)))
    }

    @Test func bothEdgesAreExact() throws {
        let rows = rows(.float32)
        for bits in Self.bits {
            let packed = try PackedRows(packing: rows, bits: bits, groupSize: 32)
            let actual = packed.dequantizedRows.reshaped([3, 20, 2, 32])
            let given = rows.reshaped([3, 20, 2, 32])
            #expect(same(actual.min(axis: -1), given.min(axis: -1)))
            let apart = abs(actual.max(axis: -1) - given.max(axis: -1)).max().item(Float.self)
            #expect(apart < 2e-5, "\(bits) \(apart)")
        }
    }

    @Test func equalElementsAreExactAndInfinitiesAreNaN() throws {
        for value in [0, -3, 0.1] as [Float] {
            let rows = MLXArray.full([1, 1, 32], values: MLXArray(value))
            let packed = try PackedRows(packing: rows, bits: 4, groupSize: 32)
            #expect(same(packed.dequantizedRows, rows))
            #expect(packed.words.asArray(UInt32.self) == [0, 0, 0, 0])
        }
        for wrong in [Float.infinity, .nan] {
            let row = concatenated([MLXArray([wrong]), MLXArray.zeros([31])]).reshaped([1, 32])
            let packed = try PackedRows(packing: row, bits: 4, groupSize: 32)
            #expect(isNaN(packed.dequantizedRows).all().item(Bool.self))
        }
    }

    /// The format is MLX's: packing what MLX's numbers are again changes none of them.
    @Test func packingAgainChangesNothing() throws {
        for bits in Self.bits {
            let once = try PackedRows(packing: rows(.float32), bits: bits, groupSize: 64)
            let again = try PackedRows(packing: once.dequantizedRows, bits: bits, groupSize: 64)
            #expect(again.words.asArray(UInt32.self) == once.words.asArray(UInt32.self))
        }
    }
}
