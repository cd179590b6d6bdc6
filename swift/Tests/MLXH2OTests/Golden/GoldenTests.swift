import Foundation
import MLX
import Testing

@testable import MLXH2O

/// All golden vectors: kept positions exactly, outputs within the manifest's tolerances.
@Suite(.serialized) struct GoldenTests {
    /// `make test` replays each fifth case, `make test-swift` all of them.
    let step = max(1, Int(ProcessInfo.processInfo.environment["MLX_H2O_STEP"] ?? "") ?? 1)

    @Test(arguments: [
        "attention", "quantized", "remainder", "accumulate", "selection", "trajectory", "framed",
        "turns", "filling", "returning", "twice", "model",
    ])
    func replays(group: String) throws {
        let golden = try Golden.shipped.get()
        let cases = golden.cases.filter { $0.group == group }
        #expect(!cases.isEmpty)
        for (number, one) in cases.enumerated() where number % step == 0 {
            let actual = try GoldenReplay.run(one, golden.of(one, "in"))
            let differences = golden.differences(actual, one)
            #expect(differences.isEmpty, "\(group)/\(differences.joined(separator: "; "))")
        }
    }

    /// The packed rows of the "quantized" cases are what packing their keys and values gives.
    @Test func rowsArePackedAsTheGoldenOnes() throws {
        let golden = try Golden.shipped.get()
        for one in golden.cases where one.group == "quantized" {
            let inputs = golden.of(one, "in"), actual = try GoldenReplay.packed(one)
            for (name, array) in actual {
                let expected = try #require(inputs[name])
                #expect(array.dtype == expected.dtype && array.shape == expected.shape)
                let same = (array .== expected).all().item(Bool.self)
                #expect(same, "\(one.name): \(name)")
            }
        }
    }

    @Test func groupsAreAllKnown() throws {
        let golden = try Golden.shipped.get()
        #expect(Set(golden.cases.map(\.group)).count == 12)
    }

    /// Every kind of array of a case, changed by a little, is noticed.
    @Test func perturbedResultsDiffer() throws {
        let golden = try Golden.shipped.get()
        for name in ["h2o-ragged-dense", "distinct-uniform-8bit"] {
            let one = try #require(golden.cases.first { $0.name == name })
            let actual = golden.of(one, "out")
            #expect(golden.differences(actual, one).isEmpty)
            for (array, values) in actual {
                var changed = actual
                changed[array] =
                    values.dtype.isFloatingPoint
                    ? values + Float(1e-3) * maximum(Float(1), abs(values)) : values + Int32(1)
                #expect(golden.differences(changed, one).count == 1, "\(array)")
                changed[array] = nil
                #expect(golden.differences(changed, one).count == 1, "\(array)")
            }
        }
    }

    @Test func damagedFilesAreRefused() throws {
        let manager = FileManager.default
        let folder = manager.temporaryDirectory.appendingPathComponent(UUID().uuidString)
        try manager.copyItem(at: checkout.appendingPathComponent("golden"), to: folder)
        defer { try? manager.removeItem(at: folder) }
        _ = try Golden(folder: folder)
        let manifest = folder.appendingPathComponent("manifest.json")
        let text = try String(contentsOf: manifest, encoding: .utf8)
        try text.replacingOccurrences(of: "\"schema\": 1", with: "\"schema\": 99")
            .write(to: manifest, atomically: true, encoding: .utf8)
        #expect(throws: GoldenError.self) { try Golden(folder: folder) }
        try text.write(to: manifest, atomically: true, encoding: .utf8)
        let file = folder.appendingPathComponent("remainder.safetensors")
        var bytes = try Data(contentsOf: file)
        bytes[bytes.count - 5] ^= 1
        try bytes.write(to: file)
        #expect(throws: GoldenError.self) { try Golden(folder: folder) }
    }
}
