import Foundation
import MLX
import MLXH2O
import MLXH2OChecks
import Testing

/// The kernels on this device, whatever it is: a Mac, an iPhone (`xcodebuild test -scheme mlx-h2o-Package
/// -destination "platform=iOS,name=..."`), or the host harness of `make test-swift`, of which a few
/// small cases are run. What is printed is to be attached to a report. Golden vectors on the device:
/// `GoldenTests` of MLXH2OTests.
@Suite(.serialized, .enabled(if: Device.defaultDevice().deviceType == .gpu)) struct DeviceTests {
    @Test func kernelsAreRightHere() throws {
        #if os(Linux)
            let report = try DeviceReport(forms: 1, slots: [])
        #else
            let report = try DeviceReport()
        #endif
        print(report.json)
        #expect(report.isGPU && !report.variants.isEmpty)
        for verdict in report.variants {
            #expect(verdict.usable, "\(verdict.variant): \(verdict.why)")
        }
        #expect(report.holds == report.variants.allSatisfy { $0.usable })
    }

    #if os(Linux)
        /// On the harness, whose times say nothing.
        @Test func callsAreTimed() throws {
            setenv("MLX_H2O_VERIFY", "never", 1)
            let timings = try DeviceReport(forms: 0, slots: [16]).timings
            #expect(timings.count == 5 && timings.allSatisfy { $0.milliseconds > 0 })
        }
    #endif
}
