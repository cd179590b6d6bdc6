import Foundation
import MLX
import Testing

/// The fused operations against loops.
@Suite struct FastTests {
    struct Case: Sendable {
        var queryHeads = 4
        var keyHeads = 2
        var queries = 3
        var keys = 5
        var width = 8
        var mask = ""
        var sinks = false
    }

    @Test(arguments: [
        Case(), Case(mask: "causal"), Case(mask: "bool"), Case(mask: "additive"),
        Case(keyHeads: 4, sinks: true), Case(queryHeads: 6, queries: 1, keys: 7, sinks: true),
    ])
    func attention(_ c: Case) {
        let random = { (shape: [Int]) in MLXRandom.normal(shape, key: MLXRandom.key(7)) }
        let q = random([1, c.queryHeads, c.queries, c.width])
        let k = random([1, c.keyHeads, c.keys, c.width])
        let v = random([1, c.keyHeads, c.keys, c.width])
        let sinks = c.sinks ? random([c.queryHeads]) : nil
        let added = random([c.queries, c.keys])
        let mask: MLXFast.ScaledDotProductAttentionMaskMode =
            switch c.mask {
            case "causal": .causal
            case "bool": .array(added .> -0.5)
            case "additive": .array(added)
            default: .none
            }
        let output = MLXFast.scaledDotProductAttention(
            queries: q, keys: k, values: v, scale: 0.3, mask: mask, sinks: sinks)

        for h in 0 ..< c.queryHeads {
            let kv = h * c.keyHeads / c.queryHeads
            for i in 0 ..< c.queries {
                let query = q[0, h, i].asArray(Float.self)
                let logits = (0 ..< c.keys).map { n -> Float in
                    let extra = added[i, n].item(Float.self)
                    switch c.mask {
                    case "causal" where n > i + c.keys - c.queries: return -.infinity
                    case "bool" where extra <= -0.5: return -.infinity
                    default: break
                    }
                    let key = k[0, kv, n].asArray(Float.self)
                    let dot = zip(query, key).map { $0 * $1 }.reduce(0, +)
                    return 0.3 * dot + (c.mask == "additive" ? extra : 0)
                }
                let sink = sinks.map { exp($0[h].item(Float.self)) } ?? 0
                let total = logits.map { exp($0) }.reduce(sink, +)
                for d in 0 ..< c.width {
                    let expected = (0 ..< c.keys).map { n in
                        exp(logits[n]) / total * v[0, kv, n, d].item(Float.self)
                    }.reduce(0, +)
                    #expect(abs(output[0, h, i, d].item(Float.self) - expected) < 1e-5)
                }
            }
        }
    }

    @Test(arguments: [true, false]) func rope(traditional: Bool) {
        let x = MLXRandom.normal([1, 2, 3, 8], key: MLXRandom.key(1))
        let y = MLXFast.RoPE(
            x, dimensions: 8, traditional: traditional, base: 10000, scale: 1, offset: 5)
        let moved = MLXFast.RoPE(
            x, dimensions: 8, traditional: traditional, base: 10000, scale: 1,
            offset: MLXArray([5]))
        #expect(allClose(y, moved, atol: 1e-6).item(Bool.self))
        for h in 0 ..< 2 {
            for i in 0 ..< 3 {
                for pair in 0 ..< 4 {
                    let (first, second) =
                        traditional ? (2 * pair, 2 * pair + 1) : (pair, pair + 4)
                    let angle = Float(5 + i) * pow(10000, -Float(2 * pair) / 8)
                    let (a, b) = (
                        x[0, h, i, first].item(Float.self), x[0, h, i, second].item(Float.self)
                    )
                    let rotated = y[0, h, i]
                    #expect(
                        abs(rotated[first].item(Float.self) - (a * cos(angle) - b * sin(angle)))
                            < 1e-5)
                    #expect(
                        abs(rotated[second].item(Float.self) - (a * sin(angle) + b * cos(angle)))
                            < 1e-5)
                }
            }
        }
    }

    @Test func rmsNorm() {
        let x = MLXRandom.normal([3, 16], key: MLXRandom.key(2))
        let weight = MLXRandom.normal([16], key: MLXRandom.key(3))
        let row = x[1].asArray(Float.self)
        let scale = 1 / sqrt(row.map { $0 * $0 }.reduce(0, +) / 16 + 1e-6)
        let expected = zip(row, weight.asArray(Float.self)).map { $0 * scale * $1 }
        let normed = MLXFast.rmsNorm(x, weight: weight, eps: 1e-6)[1]
        #expect(allClose(normed, MLXArray(expected), atol: 1e-5).item(Bool.self))
    }

    @Test(arguments: [2, 4, 8]) func packedRows(bits: Int) {
        let x = MLXRandom.uniform(-1 ..< 1, [6, 64], key: MLXRandom.key(4))
        let (packed, scales, biases) = quantized(x, groupSize: 32, bits: bits)
        #expect(packed.dtype == .uint32 && packed.shape == [6, 2 * bits])
        let back = dequantized(packed, scales: scales, biases: biases, groupSize: 32, bits: bits)
        // Half a step of each group is the most that rounding may move a value; a step when the
        // group's end is moved to have a zero.
        let step = MLX.abs(scales).max().item(Float.self)
        #expect(MLX.abs(x - back).max().item(Float.self) <= step)
        let q = MLXRandom.normal([3, 64], key: MLXRandom.key(5))
        let product = quantizedMM(
            q, packed, scales: scales, biases: biases, groupSize: 32, bits: bits)
        #expect(allClose(product, matmul(q, back.T), atol: 1e-4).item(Bool.self))
    }
}
