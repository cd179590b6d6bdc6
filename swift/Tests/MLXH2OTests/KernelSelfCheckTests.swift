import Foundation
import MLX
import Testing

@testable import MLXH2O

/// Kernels that are broken on purpose are not used, and the log says so (`make test-swift`, where
/// tests/host_gpu breaks them).
@Suite(.serialized, .enabled(if: ProcessInfo.processInfo.environment["HOST_GPU_BREAK"] != nil))
struct KernelSelfCheckTests {
    @Test func brokenKernelsAreNotUsed() throws {
        let rows = RowStream(tokens: 30, width: 32)
        func outputs(_ usesKernels: Bool) throws -> MLXArray {
            let cache = try H2OKVCache([16, 20], policy: H2OPolicies.H2O())
            cache.usesKernels = usesKernels
            let outputs = rows.run(cache, [24] + ones(4))
            #expect(!cache.isDecoding)
            return outputs
        }
        // A prompt's kernels are not broken, and round in their way.
        let apart = abs(try outputs(true) - (try outputs(false))).max().item(Float.self)
        #expect(apart < 1e-5)
        #expect(H2OKernels.refused.contains { $0.variant.hasPrefix("a fused step") })
        #expect(H2OKernels.refused.allSatisfy { $0.why.contains("differs by") })
        let notices = H2ONotice.all.filter { $0.message.contains("is not used on this device") }
        #expect(notices.count == 1)
    }
}
